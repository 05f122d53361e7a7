"""The result of compiling a call: graph, plan, kernels, schedule and program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from fxpipe.compiler.options import Options
from fxpipe.compiler.timetable import Purpose
from fxpipe.ir.instruction import Recompute
from fxpipe.ir.plan import Plan, ValueSpec
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import Traced, Value
from fxpipe.kernels.kernel import Discarding, Kernel
from fxpipe.kernels.recompute import CheckedRecompute
from fxpipe.passes.inductor.compile_stages import peaks_of, take_peaks
from fxpipe.passes.tracing.loss_terms import Divisor


class Kind(NamedTuple):
    """What a call is for, whether it updates the weights, and whether it returns outputs, each for
    the whole batch. One for ``backward`` also has the gradients of inputs that require them."""

    purpose: Purpose
    updates: bool = False
    outputs: bool = True


@dataclass(frozen=True)
class Compiled:
    """All that runs a call of one kind and one batch shape.

    Attributes:
        traced: the graph of the whole model, and its loss where there is one.
        plan: the plan for the first micro-batch's size.
        kernels: micro-batch → stage → kernel.
        schedule: the schedule.
        program: the program; on a rank with the list of its own device alone.
        whole: makes the program with the lists of all devices.
        purpose: what the call is for.
        samples: how many samples the first micro-batch has.
        threads: how many threads run the devices' instruction lists: 1, or one for each device.
        terms: micro-batch → what each term of its loss is divided by, see ``loss_terms``; empty
            where the caller says how losses are weighted.
        specs: micro-batch → what is known of its values.
    """

    traced: Traced
    plan: Plan
    kernels: Sequence[Sequence[Kernel]]
    schedule: Schedule
    program: Program
    whole: Callable[[], Program]
    purpose: Purpose
    samples: int
    threads: int
    terms: Sequence[tuple[Divisor | None, ...]] = ()
    specs: Sequence[Mapping[str, ValueSpec]] = ()

    @property
    def results(self) -> frozenset[str]:
        """The names of the model's outputs that the program returns to the caller."""
        values = {out.name for out in self.traced.outputs if isinstance(out, Value)}
        return self.plan.results & values

    def names(self, stage: int) -> frozenset[str]:
        """The parameters and buffers in the model that a stage reads or writes."""
        own = self.plan.stages[stage]
        found = {each.target for each in (*own.parameters, *own.buffers)}
        found |= {each.target for each in own.writes}
        for norm in self.traced.deferred:
            if norm.moments in found:
                found |= {norm.running_mean, norm.running_var}
                found |= {norm.tracked} if norm.tracked else set()
        return frozenset(found)

    def weighted(self, weights: Sequence[float]) -> Compiled:
        """The same with kernels that discard the gradients of micro-batches of weight 0."""
        kernels = [
            kernels if weight else [Discarding(kernel) for kernel in kernels]
            for kernels, weight in zip(self.kernels, weights, strict=True)
        ]
        return replace(self, kernels=kernels)

    def rechecked(self) -> Sequence[Sequence[Kernel]]:
        """The kernels for one step, in which recomputations are compared with their forwards."""
        again = {x.stage for own in self.program.lists for x in own if isinstance(x, Recompute)}
        return [
            [
                CheckedRecompute(kernel, stage, i) if stage in again else kernel
                for stage, kernel in enumerate(own)
            ]
            for i, own in enumerate(self.kernels)
        ]


def exchanged(traced: Traced, plan: Plan) -> tuple[object, ...]:
    """What is equal where one program can run micro-batches of two graphs: edges, buckets, loss and
    outputs."""
    outputs = [out.name if isinstance(out, Value) else None for out in traced.outputs]
    return plan.edges, plan.buckets, traced.loss, outputs


def agree_on_plans(options: Options, schedule: Schedule, plans: Sequence[Plan]) -> None:
    """Check that all ranks have made the same plans, each for a size of micro-batch, and hear what
    the others have compiled of them, which has other peaks of memory. Raises RankError."""
    first, group = plans[0], options.group
    trained = [[each.target for each in stage.parameters] for stage in first.stages]
    own = [s.index for s in first.stages if options.stage_compiler and options.owns(s.index)]
    told = group.agree(
        "the compiled plan",
        f"{schedule}\n{trained}",
        own=str(first),
        value=[peaks_of(plan, own) for plan in plans],
    )
    for rank in group.pipeline:
        for plan, peaks in zip(plans, told[rank], strict=True):
            take_peaks(plan, peaks)


def restoring(parts: Sequence[object]) -> Callable[[], None]:
    """Keep what these have made so far; returns what restores that, and forgets what came since."""
    before = [(each, {**vars(each)}) for each in parts]
    for each, values in before:
        vars(each).update({k: copy(v) for k, v in values.items() if type(v) in (dict, set)})

    def restore() -> None:
        for each, values in before:
            vars(each).clear()
            vars(each).update(values)

    return restore


@dataclass(frozen=True)
class Owned:
    """What one process has of a model. Names are those that the model lists first.

    Attributes:
        names: id of a parameter or buffer → its name.
        kept: those that this process has the newest values of, and no other process keeps.
        used: those that this process needs the values of.
        rest: whether this process also keeps what is neither a parameter nor a buffer.
    """

    names: Mapping[int, str]
    kept: frozenset[str]
    used: frozenset[str]
    rest: bool

    def keeps(self, value: Any) -> bool:
        """Whether this process keeps a value of the model's state dict."""
        return self.names[id(value)] in self.kept if id(value) in self.names else self.rest


def owned(model: nn.Module, compiled: Compiled | None, owns: Callable[[int], bool]) -> Owned:
    """What this process has of a model.

    What belongs to no stage is kept with the first stage. Before anything is compiled, everything
    is, and all processes use everything.
    """
    names: dict[int, str] = {}
    first: dict[str, str] = {}
    for listed in (model.named_parameters, model.named_buffers):
        for name, tensor in listed(remove_duplicate=False):
            first[name] = names.setdefault(id(tensor), name)
    keeper: dict[str, int] = {}
    used: set[str] = set()
    for stage in () if compiled is None else compiled.plan.stages:
        assert compiled is not None
        found = {first[name] for name in compiled.names(stage.index) if name in first}
        written = {first[write.target] for write in stage.writes if write.target in first}
        keeper |= {name: stage.index for name in found if name in written or name not in keeper}
        if owns(stage.index):
            used |= found
    common = set(names.values()) - keeper.keys()
    rest = owns(0)
    kept = {name for name, stage in keeper.items() if owns(stage)} | (common if rest else set())
    if rest or compiled is None:
        used |= common
    return Owned(names, frozenset(kept), frozenset(used), rest)
