"""The front end: trace a model with its loss on one micro-batch.

The tracing passes make the graphs. Submodules around lines that cannot be traced are called as they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxpipe.compiler import passes
from fxpipe.compiler.guard import Guard
from fxpipe.compiler.leaf_modules.extension import LeafModules
from fxpipe.compiler.memo import Memo
from fxpipe.compiler.options import Options
from fxpipe.compiler.preflight import output_dims
from fxpipe.compiler.reads import Reads, StandIns
from fxpipe.compiler.timetable import Purpose
from fxpipe.compiler.unread import ReadError
from fxpipe.errors import InputError, TraceError
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import SEED, Traced, Value
from fxpipe.passes.differentiate.divide import Wanted
from fxpipe.passes.runner import run_all
from fxpipe.passes.tracing.any_size import AnySize
from fxpipe.passes.tracing.explain import untraceable
from fxpipe.passes.tracing.loss_module import LossModule, in_loss
from fxpipe.passes.tracing.shapes import Dims, shapes_of
from fxpipe.runtime.batch import Batch
from fxpipe.torchtools import source
from fxpipe.torchtools.pytrees import taken_apart
from fxpipe.torchtools.state import collect, intra_op_threads, put_back, untouched


@dataclass(frozen=True)
class Call:
    """A call, for its micro-batches of one size: one of them is traced, and a plan made for all.

    Attributes:
        batch: the call's inputs, and its targets for a step.
        leaves: the flat inputs and targets of one micro-batch.
        size: the samples in the micro-batch.
        purpose: what the call is for.
        wants: for each leaf whether the call returns a gradient for it.
        schedule: the call's schedule.
        fixed: whether the graph has to hold for this size only; None if it does not matter.
    """

    batch: Batch
    leaves: list[Any]
    size: int
    purpose: Purpose
    wants: tuple[bool, ...]
    schedule: Schedule
    fixed: bool | None = None

    @property
    def dims(self) -> Dims:
        """For each flat input and target its batch dimensions: one, or none."""
        return [() if dim is None else (dim,) for dim in self.batch.dims]

    @property
    def uniform(self) -> bool:
        """Whether all micro-batches of the call have this size."""
        return self.batch.size % self.schedule.microbatches == 0

    @property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """For each flat input and target its shape in a micro-batch; None if it is no tensor."""
        return tuple(shapes_of(self.leaves))

    @property
    def with_loss(self) -> bool:
        """Whether the graph computes the loss."""
        return self.purpose == "step"

    @property
    def parted(self) -> bool:
        """Whether backwards are split into two halves."""
        return "I" in self.schedule.kinds

    def without_data(self) -> Call:
        """The same call on the meta device, so that it does not keep the batch alive."""
        return self._mapped(lambda tensor: tensor.detach().to("meta"))

    def zeros(self) -> Call:
        """The same call with zeros for data, on the CPU."""
        return self._mapped(lambda tensor: torch.zeros_like(tensor, device="cpu"))

    def facts(self, traced: Traced, model: nn.Module) -> dict[str, Any]:
        """The facts that passes need of a graph for this call: ``traced``, the graph itself;
        ``values``, input → the micro-batch's leaf, which requires a gradient if the call returns
        it; ``state``, the model's parameters, buffers and constants; and ``wanted``."""
        values: dict[str, Any] = {}
        for name, leaf, wants in zip(traced.inputs, self.leaves, self.wants, strict=True):
            if name is not None:
                values[name] = leaf.detach().requires_grad_() if wants else leaf
        if traced.seeded:
            values[SEED] = torch.zeros((), dtype=torch.int64)
        state, wanted = traced.state_of(model), self.wanted(traced)
        return {"traced": traced, "values": values, "state": state, "wanted": wanted}

    def as_trained(self, traced: Traced, model: nn.Module) -> dict[str, Any]:
        """The same facts, but with gradients, which later calls may want even if this one wants
        none; and ``needed``, what this call wants."""
        purpose: Purpose = "step" if self.purpose == "step" else "call"
        facts = replace(self, purpose=purpose).facts(traced, model)
        return {**facts, "needed": self.wanted(traced)}

    def wanted(self, traced: Traced) -> Wanted:
        """The values of a graph whose gradients start the backwards."""
        match self.purpose:
            case "step":
                assert traced.loss is not None
                return Wanted(frozenset((traced.loss,)))
            case "call":
                names = (out.name for out in traced.outputs if isinstance(out, Value))
                return Wanted(frozenset(names), inputs=True)
            case "infer":
                return Wanted()

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Call:
        leaves = pytree.tree_map_only(Tensor, change, self.leaves)
        return replace(self, batch=self.batch.mapped(change), leaves=leaves)


class FrontEnd:
    """Traces a model with its loss into one graph. The model's state is not changed.

    Attributes:
        leaves: what is called as it is, and more where lines cannot be traced.
        guard: watches what the traces depend on besides the call.
    """

    def __init__(self, options: Options, memo: Memo) -> None:
        self.options, self._memo = options, memo
        given = (each for each in options.extensions if isinstance(each, LeafModules))
        self.leaves = next(given, LeafModules()).leaves(options)
        self.guard = Guard(options, self.leaves.called)
        self.reads = Reads()
        self._told: set[str] = set()  # other warnings that were given

    def trace(self, call: Call, *, free: Dims = ()) -> Traced:
        """Trace the model, and for a step its loss, for micro-batches like this one: for any sizes
        of the ``free`` dimensions of inputs and targets, if it can be. Raises InputError or
        TraceError."""
        places = [self.guard.numbers[name] for name in call.batch.others]
        stand_ins = self.reads.stand_ins(call.batch, places)
        while True:
            try:
                traced = self._trace(call, free, stand_ins)
            except Exception as error:
                if source.lacks_memory(error):
                    raise
                if not stand_ins.found(error):
                    if stand_ins.numbers or not isinstance(error, TraceError):
                        raise
                    of_loss = in_loss(error.__cause__) and not self.leaves.loss
                    take = self.leaves.take_loss if of_loss else self.leaves.take
                    take(error)
            else:
                if stand_ins.kept:
                    self._run_again(call)
                    raise TraceError("a number is kept by what the code writes")
                if not stand_ins.found(all_read=traced.calls):
                    self.leaves.tell()
                    return traced
                del traced

    def _sketching(self) -> AbstractContextManager[Any]:
        """Inside, the model runs without data if costs are given."""
        if self.options.costs is None:
            return nullcontext()
        return FakeTensorMode(allow_non_fake_inputs=True)

    def _run_again(self, call: Call) -> None:
        """Run the model with its own numbers, so that what the code keeps of them are numbers."""
        args, kwargs, _ = call.batch.unflatten(call.leaves)
        with (
            untouched(self.options.model),
            intra_op_threads(self.options.threads),
            torch.no_grad(),
            self._sketching(),
        ):
            self.options.model(*args, **kwargs)

    def _trace(self, call: Call, free: Dims, stand_ins: StandIns) -> Traced:
        options, loss, inputs = self.options, self.options.loss, call.batch.inputs
        args, kwargs, targets = call.batch.unflatten(call.leaves)
        facts = {
            **vars(options),
            "guard": self.guard,
            "objective": options.objective
            if loss is None
            else replace(options.objective, loss=stand_ins.loss(loss)),
            "args": args,
            "kwargs": kwargs,
            "targets": targets,
            "size": call.size,
            "called": self.leaves.called,
            "told": self._told,
            "keeps_all": call.purpose != "infer" and "R" not in call.schedule.kinds,
            "given_loss": call.with_loss and loss is not None,
            "returned_loss": call.with_loss and loss is None,
            "leaves": self.leaves,
        }
        self.leaves.begin()
        run_all(passes.of(options, "admit"), facts)
        given = dict(zip(call.batch.names, call.leaves, strict=True))
        with untouched(options.model), put_back(given), intra_op_threads(options.threads):
            leaves = dict(zip(call.batch.names, call.leaves[:inputs], strict=False))
            with (
                put_back(leaves) as written,
                stand_ins.inside(options.model),
                self._sketching(),
            ):
                tried = run_all(passes.of(options, "try"), facts)
            self.guard.calls_loss = self.leaves.loss
            if written:
                raise TraceError(
                    f"the model writes into its input {written[0]!r}; let it work on a copy "
                    "(x = x.clone()), or out of place (nn.ReLU without inplace=True)"
                )
            facts["logged"] = tried.get("logged", ())
            return self._captured(call, tried["output"], facts, stand_ins, free)

    def _captured(
        self, call: Call, output: Any, facts: dict[str, Any], stand_ins: StandIns, free: Dims
    ) -> Traced:
        """The graph of the model and its loss with their backward."""
        options, loss, leaves = self.options, self.options.loss, self.leaves
        flat, spec = pytree.tree_flatten(taken_apart(output))
        made = None
        *_, targets, numbers = stand_ins.arguments(call.leaves)
        state = self.guard.state()
        if facts["given_loss"]:
            assert loss is not None
            own = stand_ins.loss(options.objective.with_logged)
            made = LossModule(own, loss, spec, facts["logged"])
            if not leaves.loss:
                with self.guard.reading(), self._sketching():
                    made(*flat, *targets, *numbers)
        with leaves.calls() as calls, stand_ins.inside(options.model):
            if calls is not None and stand_ins.numbers:
                raise TraceError("a graph that calls modules takes no numbers")
            facts = {
                **facts,
                "loss_module": made,
                "output": flat,
                "real_targets": targets,
                "names": call.batch.names,
                "wants": call.wants,
                "step": call.with_loss,
                "calls": calls,
            }

            def capture(leaves: Sequence[Any]) -> Traced:
                words = "args", "kwargs", "targets", "numbers"
                given = dict(zip(words, stand_ins.arguments(leaves), strict=True))
                found: Traced = run_all(passes.of(options, "capture"), {**facts, **given})["traced"]
                return found

            try:
                traced = None
                if calls is None:
                    traced = self._for_any_size(call, state, free, capture)
                traced = traced or capture(call.leaves)
            except Exception as error:
                if source.lacks_memory(error) or isinstance(error, InputError):
                    raise
                if stand_ins.seen:
                    raise ReadError from error
                of = made if made is not None and in_loss(error) else options.model
                raise untraceable(of, error) from error
        collect()
        return traced

    def _for_any_size(
        self,
        call: Call,
        state: tuple[Any, ...],
        free: Dims,
        capture: Callable[[Sequence[Any]], Traced],
    ) -> Traced | None:
        """A call's graph, of one for any sizes of the ``free`` dimensions; None if there is none,
        as for the first sizes."""
        made: Traced | None = None

        def fits(graph: AnySize) -> bool:
            nonlocal made
            made = graph.at(call.leaves)
            return made is not None or (graph.traced is None and graph.free == tuple(free))

        def captured() -> AnySize:
            nonlocal made
            graph, made = AnySize.of(free, call.leaves, capture)
            return graph

        if any(free):
            self._memo("any size", lambda: self.kind(call, state), captured, fits)
        else:
            self._memo.find("any size", self.kind(call, state), fits)
        return made

    def kind(self, call: Call, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """Everything that a trace depends on but sizes, with this state of the guard."""
        # what is captured has the gradients of these inputs
        wants = () if call.with_loss else call.wants
        return *state, self.reads.like(call.batch), call.with_loss, wants

    def output_dims(self, traced: Traced, call: Call) -> Sequence[tuple[int, ...]] | None:
        """For each flat output of a graph its batch dimensions; None if they are not known."""
        args, kwargs, _ = call.batch.unflatten(call.leaves)
        dims, model = call.dims[: call.batch.inputs], self.options.model
        with untouched(model), intra_op_threads(self.options.threads):
            return output_dims(model, args, kwargs, dims, _flat_outputs(traced), call.size)


def _flat_outputs(traced: Traced) -> list[Any]:
    """The flat outputs, without data."""
    values = {node.name: node.meta.get("val") for node in traced.graph.nodes}
    return [values[o.name] if isinstance(o, Value) else o.value for o in traced.outputs]
