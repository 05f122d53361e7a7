"""Compile a call of a model to a plan with kernels, a schedule and a program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from fxpipe.compiler import passes
from fxpipe.compiler.compiled import Compiled, Kind, exchanged
from fxpipe.compiler.front_end import Call
from fxpipe.compiler.guard import KEPT
from fxpipe.compiler.loss_weight.terms import loss_terms
from fxpipe.compiler.loss_weight.weighing import Weighing
from fxpipe.compiler.memo import Memo
from fxpipe.compiler.objective import Weighed
from fxpipe.compiler.options import Options
from fxpipe.compiler.placement import Placement
from fxpipe.compiler.plans import Plans
from fxpipe.compiler.residence import settle
from fxpipe.compiler.timetable import Purpose, Timetable
from fxpipe.errors import InputError, PartitionError, TraceError
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import Traced
from fxpipe.kernels.kernel import Kernel
from fxpipe.log import reported
from fxpipe.parts import Parts
from fxpipe.passes.graph.lazy_module import sources_forgotten
from fxpipe.passes.partition.work import StageLoad
from fxpipe.passes.runner import run_all
from fxpipe.passes.tracing.loss_module import returned_loss
from fxpipe.passes.tracing.shapes import shapes_of
from fxpipe.runtime.batch import Batch, MicroBatches
from fxpipe.runtime.choice import ThreadChoice
from fxpipe.runtime.host import BatchHost, Watch
from fxpipe.signals import HeldSignals
from fxpipe.torchtools.state import (
    without_collection,
    without_saved_tensor_hooks,
)


class Known(NamedTuple):
    """What a call was compiled to, with the graph and the plan of each size of micro-batch."""

    compiled: Compiled
    plans: Sequence[tuple[Traced, Plan]]


class CallKey(NamedTuple):
    """Everything that the result of compiling a call depends on.

    Attributes:
        state: of the model, see ``Guard.state``; the number of its Python state comes first.
        batch: of its batch, see ``Reads.key``.
        size: the samples in the batch.
        others: what else is asked of the call.
    """

    state: tuple[Any, ...]
    batch: tuple[Any, ...]
    size: int
    others: tuple[Any, ...]


class Change(NamedTuple):
    """What a call was compiled for: the call before, this one, the names of the leaves of its
    batch, and the Python state that has changed last."""

    old: CallKey
    new: CallKey
    names: Sequence[str]
    changed: str


class NumbersError(Exception):
    """A graph cannot take numbers of a call as inputs."""


class Compiler:
    """Runs the passes when a call needs them, and keeps their results for later calls.

    Attributes:
        options: the checked arguments of ``fxpipe.compile``.
        choice: decides how many threads run the devices' instruction lists.
        timetable: makes the schedules.
        plans: makes the plans.
        state: the state of the model when ``numbered`` was last called, see ``Guard.state``.
        change: what the last call was compiled for; None if it was not, or is the first.
    """

    _fixed: tuple[bool | None, ...] = (None, True)
    """Values of ``Call.fixed`` to try: whether a graph is for one size of micro-batch only. The
    second one is for two sizes whose graphs cannot share a program."""

    def __init__(self, options: Options, choice: ThreadChoice) -> None:
        self.options = options
        self.choice = choice
        self._wraps = [wrap for each in options.extensions if (wrap := each.kernels())]
        self.timetable = Timetable(options)
        self._placement = Placement(options, self.timetable)
        self.memo = Memo()
        self.plans = Plans(options, self._placement, self.memo)
        self._guard = self.plans.front_end.guard
        self._last: CallKey | None = None
        self._reads = self.plans.front_end.reads
        self._weighing = Weighing(options)
        self.state: tuple[Any, ...] = (None,)
        self.change: Change | None = None

    def numbered(self, batch: Batch) -> Batch:
        """Look at the model's state, and at the numbers that graphs take as inputs: the same batch
        with these. To be called first for each call."""
        self.state = self._guard.state()
        if not (batch.plain or self._guard.numbers):
            return batch
        numbers = {name: at.get() for name, at in self._guard.numbers.items()}
        return self._reads.numbered(batch, numbers)

    def known(self, micro: MicroBatches, kind: Kind) -> Compiled | None:
        """Return what an earlier call like this one was compiled to; None if there was none."""
        key = self._key(micro, kind)
        known: Known | None = self.memo.find("call", key)
        self.change = None
        if known is None:
            return None
        self._last = key
        for traced, plan in known.plans if self.options.places else ():
            settle(self.options, traced, plan, known.compiled.schedule)
        return known.compiled

    def compile(self, micro: MicroBatches, kind: Kind) -> Compiled:
        """Compile a call, using the results of earlier calls.

        Meanwhile nothing may change the model, and no other call may run: see ``fxpipe.locks``.

        Raises:
            NumbersError: the graph cannot take the batch's numbers as inputs, see ``fixed``.
        """
        try:
            return self._within_limits(micro, kind)
        except PartitionError as error:
            step = kind.purpose == "step" and not self.options.decides
            if error.limited and step and (advise := Parts.fitting.get()):
                error.args = (f"{error}; {advise(self, micro, kind)}",)
            raise

    def _within_limits(self, micro: MicroBatches, kind: Kind) -> Compiled:
        """Compile a call, and cut anew as long as a device exceeds its memory limit."""
        name, size = type(self.options.model).__name__, micro.batch.size
        last, first, made = self._last, self._key(micro, kind), self.plans.made
        with self.compiling(f"{name} for a {kind.purpose} of {size} samples"):
            compiled = self._compile(micro, kind)
            while kind.purpose == "step" and not self._placement.judged:
                if self._placement.keeps_limits(self._peaks(compiled)):
                    break
                self._forget()
                compiled = self._compile(micro, kind)
        self._last = self._key(micro, kind)
        self.memo.keep("call", KEPT)
        self.plans.sizes.keep()
        if self.plans.made > made and last is not None:
            self.change = Change(last, first, micro.batch.names, self._guard.changed)
        return compiled

    def fixed(self, batch: Batch) -> Batch:
        """Let the numbers of a batch that no graph takes as inputs be constants from now on: the
        batch to compile instead."""
        self._guard.fix(self._reads.fix(batch))
        return self.numbered(batch.without_numbers())

    def decides(self, micro: MicroBatches) -> bool:
        """Whether a schedule has to be chosen for this batch."""
        return False

    def decide(self, micro: MicroBatches, *, updates: bool) -> int:
        """Choose a schedule; returns the number of micro-batches for the batch."""
        return len(micro)

    def _forget(self) -> None:
        """Forget cuts and programs, but keep traces and measured costs."""
        self.plans.forget()
        self.memo.forget("call", "program")

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Inside, something is compiled, which the log names."""
        with (
            HeldSignals(),
            torch.compiler.set_stance("force_eager"),  # graphs hold what torch.compile would hide
            reported(what, shows=self.options.group.rank == 0),
            without_collection(),
            sources_forgotten(),
            without_saved_tensor_hooks(),
            self.options.group.compiling(self._parts),
            self.plans.front_end.leaves.trying(),
        ):
            yield

    @property
    def _parts(self) -> Sequence[object]:
        """The objects that change when something is compiled."""
        return self, self.memo, self.plans, self.plans.sizes, self._placement, *self._placement.kept

    def _compile(self, micro: MicroBatches, kind: Kind) -> Compiled:
        known = self.memo.anew(
            "call", lambda: self._key(micro, kind), lambda: self._known(micro, kind)
        )
        return known.compiled

    def _known(self, micro: MicroBatches, kind: Kind) -> Known:
        self.plans.look()
        purpose, batch, microbatches, sizes = kind.purpose, micro.batch, len(micro), micro.sizes
        wants = batch.wants(purpose)
        schedule = self.timetable.schedule(microbatches, purpose)
        first = Call(batch, micro.leaves[0], sizes[0], purpose, wants, schedule)
        # the graph of a whole batch serves a partial one, too, beside another for one size only
        shapes = [tuple(shapes_of(leaves)) for leaves in micro.leaves]
        serves = len(set(sizes)) > 1 and self.plans.sizes.first(first) in shapes
        # a graph for one size has other names than one for several
        for fixed in reversed(self._fixed) if serves else self._fixed:
            calls = {
                size: Call(
                    batch, micro.leaves[sizes.index(size)], size, purpose, wants, schedule, fixed
                )
                for size in dict.fromkeys(sizes)
            }
            plans = self._planned(calls, batch)
            traced, plan = plans[sizes[0]]
            if all(exchanged(*made) == exchanged(traced, plan) for made in plans.values()):
                break
        else:
            raise InputError(
                f"micro-batches of {sizes[0]} and {sizes[-1]} samples take different ways "
                f"through the model; give a batch size that {microbatches} divides"
            )
        if purpose == "step" and not any(edge.value == traced.loss for edge in plan.gradients):
            raise InputError(
                "the loss has a gradient to no parameter, so that a step would train nothing; "
                "let some parameter that it depends on require a gradient"
            )
        if any(schedule.working):
            refuse = Parts.refuse_copied.find(f"schedule {schedule.name!r}")
            refuse(schedule, plan, traced.deferred)
        if kind.outputs:
            traced = self.plans.output_dims(calls[sizes[0]], traced)
        made = [plan for _, plan in plans.values()]
        self.options.group.same_plans(self.options, schedule, traced, made)
        program, whole = self._program(plan, schedule, purpose, kind.updates)
        kernels = {
            size: self._kernels(plan, schedule, program) for size, (_, plan) in plans.items()
        }
        if purpose != "step" and self.options.loss is None:
            traced = replace(traced, loss=returned_loss(traced))
        terms: list[Sequence[Any]] = []
        if traced.loss is not None and self.options.objective.averages:
            split = [index for index, dim in enumerate(batch.dims) if dim is not None]
            terms_of = {
                size: loss_terms(replace(graph, loss=traced.loss), split)
                for size, (graph, _) in plans.items()
            }
            terms = [terms_of[size] for size in sizes]
        compiled = Compiled(
            traced,
            plan,
            [kernels[size] for size in sizes],
            schedule,
            program,
            whole,
            purpose,
            sizes[0],
            self.choice.threads(plan, schedule, sizes[0] / self._placement.samples),
            terms,
            [plans[size][1].specs for size in sizes],
            self.options.group.call,
        )
        self._reads.proven(batch)
        self.state = self._guard.state()  # running the model may have changed it
        return Known(compiled, [*plans.values()])

    def _planned(self, calls: Mapping[int, Call], batch: Batch) -> dict[int, tuple[Traced, Plan]]:
        """The graph and the plan of each size of micro-batch. Raises NumbersError on all ranks if
        one of them finds that a graph cannot take the numbers of the batch."""
        if not batch.numbers:
            return {size: self.plans.plan(call) for size, call in calls.items()}
        plans, error = {}, None
        try:
            plans = {size: self.plans.plan(call) for size, call in calls.items()}
        except TraceError as raised:
            error = raised
        if any(self.options.group.exchange("numbers", error is not None)):
            raise NumbersError(f"{', '.join(map(str, batch.numbers))}: {error}") from error
        return plans

    def _kernels(self, plan: Plan, schedule: Schedule, program: Program) -> Sequence[Kernel]:
        kernels: Sequence[Kernel] = [s.kernel for s in plan.stages if s.kernel is not None]
        for wrap in self._wraps:
            kernels = wrap(kernels, plan, schedule, program)
        return kernels

    def _key(self, micro: MicroBatches, kind: Kind) -> CallKey:
        """Everything that the result of compiling a call depends on."""
        batch = micro.batch
        others = batch.wants(kind.purpose), len(micro), kind
        return CallKey(self.state, self._reads.key(batch), batch.size, others)

    def weighed(self, compiled: Compiled, micro: MicroBatches) -> Weighed:
        """See ``Weighing.weighed``; the same micro-batches if there is no loss."""
        if compiled.traced.loss is None or "weighed" in compiled.done:
            return Weighed(compiled, micro)
        weighed = self._weighing.weighed(compiled, micro)
        return weighed if weighed.watch is None else self._trying(weighed, weighed.watch)

    def told(self, compiled: Compiled, micro: MicroBatches) -> Mapping[str, Any]:
        """See ``Weighing.told``."""
        return {} if compiled.traced.loss is None else self._weighing.told(compiled, micro)

    def _trying(self, weighed: Weighed, watch: Watch) -> Weighed:
        """The same, with a watch that may run the loss."""
        leaves, look = self.plans.front_end.leaves, watch.look

        def trying(host: BatchHost) -> None:
            with leaves.trying():
                look(host)

        return weighed._replace(watch=replace(watch, look=trying))

    @property
    def loads(self) -> Sequence[StageLoad]:
        """Stage → load; empty before the model is measured and partitioned."""
        return self._placement.loads

    def _peaks(self, compiled: Compiled) -> list[float]:
        """Device → the most bytes that it is predicted to hold in a step."""
        peaks = Parts.peaks.find("memory_limits=")
        state = compiled.traced.state_of(self.options.model)
        return [*map(float, peaks(compiled, self.options, state))]

    def _program(
        self, plan: Plan, schedule: Schedule, purpose: Purpose, updates: bool
    ) -> tuple[Program, Callable[[], Program]]:
        """Return the program to run, which on a rank has the list of its own device only, and a
        function that makes the program of all devices."""
        group = self.options.group
        key = (plan.edges, plan.gradients, plan.buckets, schedule.microbatches, purpose, updates)
        whole = partial(self.lowered, plan, schedule, purpose, updates)
        known = self.memo.find("program", key)
        program = self.memo.anew(
            "program", lambda: key, lambda: group.same_program(whole, known, schedule, plan)
        )
        return program, whole if group.size > 1 else lambda: program

    def lowered(
        self,
        plan: Plan,
        schedule: Schedule,
        purpose: Purpose,
        updates: bool,
        only: Collection[int] = (),
    ) -> Program:
        """Lower a plan and a schedule to the program of all devices; where each pass can, to the
        lists of these devices alone, of which those that exchange values with no other are
        whole."""
        facts = {
            "schedule": schedule,
            "plan": plan,
            "updates": updates,
            "pause": purpose == "call",
            "replicas": self.options.replicas,
            "streams": bool(self.options.places),
            "only": only,
        }
        # all ranks of a replica make the same program, and compare it
        trusted = () if self.options.group.device == 0 else (Program,)
        made = passes.of(self.options, "program")
        if not all(each.apart for each in made if each.runs(facts)):
            facts["only"] = ()
        program: Program = run_all(made, facts, trusted)["program"]
        return program
