"""Rehearse a program for predictions: run steps of it and take their times.

A rehearsed step runs on the pipe's own threads, with random numbers for a batch. It drops its
results and updates copies of the weights, so it does not change the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from itertools import accumulate
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.compiler.compiled import Compiled, Kind
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.front_end import Call
from fxpipe.compiler.options import Options
from fxpipe.engine import Engine
from fxpipe.errors import told
from fxpipe.extensions.simulator.costs import Overheads, Rehearsal
from fxpipe.extensions.simulator.overheads import StepTimes, learned, overheads
from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task
from fxpipe.ir.value import HOST
from fxpipe.log import LOGGER
from fxpipe.runtime.batch import Batch
from fxpipe.runtime.host import BatchHost, Job
from fxpipe.runtime.run import FlushedRun
from fxpipe.runtime.weights.live import LiveWeights
from fxpipe.runtime.weights.optimizer_state import frozen
from fxpipe.signals import HeldSignals
from fxpipe.torchtools.optimizers import alone

_LEAST, _MOST, _SECONDS = 4, 20, 0.5
"""The least and the most steps to rehearse after a warm-up step, and for how many seconds."""

_SAMPLED = 1 << 22
"""A rehearsed update leaves out the parameters of a stage after this many elements; its time is
scaled up."""


_KNOWN: WeakKeyDictionary[Any, dict[int, tuple[Program, Rehearsal]]] = WeakKeyDictionary()
"""The first stage's kernel, which identifies the plan of a pipe → id of a program → the program,
which stays alive so that no other one has its id, and its rehearsal."""


def rehearsal_of(compiler: Compiler, engine: Engine, compiled: Compiled) -> Rehearsal | None:
    """The rehearsal of a call's program; None if there is none and it cannot be made now. Over
    several ranks, where no rank can rehearse alone, only ``learn`` makes one."""
    known = _of_plan(compiled)
    if id(compiled.program) not in known:
        call = compiler.plans.graph_of(compiled.traced).call
        rehearsal = rehearse(compiler, engine, compiled, call)
        if rehearsal is None:
            return None
        known[id(compiled.program)] = compiled.program, rehearsal
    return known[id(compiled.program)][1]


def _of_plan(compiled: Compiled) -> dict[int, tuple[Program, Rehearsal]]:
    return _KNOWN.setdefault(compiled.plan.stages[0].kernel, {})


def learn(options: Options, compiled: Compiled, runs: Sequence[StepTimes], steps: int = 1) -> None:
    """Replace the rehearsal of a program by the times of real runs of so many steps, unless devices
    have streams. All ranks learn from the first replica, so that they predict the same."""
    if options.places:
        return
    group, known = options.group, _of_plan(compiled)
    apart = group.size > 1
    serial = not apart and compiled.threads == 1

    def taught() -> list[Any] | None:
        try:
            program, machine = compiled.whole(), overheads()
            found = learned(program, runs, machine, serial=serial, steps=steps, apart=apart)
        except Exception as error:  # what has run counts all the same
            LOGGER.info("no times are learned of this run: %s", told(error))
            return None
        costs = [[letter, stage, time] for (letter, stage), time in found.costs.items()]
        return [costs, astuple(found.overheads), found.off]

    if (shared := group.share("what the runs teach", taught)) is None:
        return
    costs, machine, off = shared
    times = {(letter, stage): time for letter, stage, time in costs}
    before = known[id(compiled.program)][1].off if id(compiled.program) in known else 0.0
    found = Rehearsal(times, Overheads(*machine), serial, max(off, before))
    known[id(compiled.program)] = compiled.program, found


def rehearse(
    compiler: Compiler, engine: Engine, compiled: Compiled, call: Call
) -> Rehearsal | None:
    """Run some steps of a call's program. Returns None if this process does not run all devices on
    CPUs, batches are in flight, or stages run leaf modules; or if a step fails, as the log says.

    Args:
        compiler: lowers the program of a rehearsal.
        engine: runs it.
        compiled: the call.
        call: a similar call, with micro-batches of any size.
    """
    options = compiler.options
    alone = options.group.size == 1 and not options.places
    if compiled.traced.under_autograd or options.hollow or not engine.flushed or not alone:
        return None
    try:
        engine.check()
        with engine.quiet():
            return _Steps(compiler, engine, compiled, call).rehearsal()
    except Exception as error:
        LOGGER.info("the program is not rehearsed: %s", told(error))
        return None


class _Steps:
    """The steps of a rehearsal."""

    def __init__(self, compiler: Compiler, engine: Engine, compiled: Compiled, call: Call) -> None:
        self._compiler, self._engine, self._compiled = compiler, engine, compiled
        plan, program = compiled.plan, compiled.program
        if program.depth or any(isinstance(x, ins.Run) for list_ in program.lists for x in list_):
            schedule = _flushing(compiled.schedule)
            program = compiler.lowered(plan, schedule, "step", engine.updates)
        self._program = program
        self._count = count = compiled.schedule.microbatches
        samples = compiled.samples * count
        like = call.zeros().resized(samples).random()
        self._batch = replace(like.batch, leaves=tuple(like.leaves), size=samples)
        self._arguments = self._batch.unflatten(self._batch.leaves)
        self._kernels = [[stage.kernel for stage in plan.stages if stage.kernel]] * count
        self._updates: dict[int, _Update] = {}
        state = engine.progress.state_of(compiled.traced)
        for stage, optimizer in zip(plan.stages, self._optimizers(state), strict=True):
            if optimizer is not None and stage.parameters:
                self._updates[stage.index] = _Update(stage, state, optimizer)

    def rehearsal(self) -> Rehearsal:
        """Run steps until the times are stable, and return what they teach."""
        times: list[StepTimes] = []
        self._step()  # warms up
        latest = perf_counter() + _SECONDS
        while len(times) < _LEAST or (len(times) < _MOST and perf_counter() < latest):
            times.append(self._step())
        shares = {stage: update.share for stage, update in self._updates.items()}
        serial = self._compiled.threads == 1
        return learned(self._program, times, overheads(), serial=serial, shares=shares)

    def _step(self) -> StepTimes:
        """Do all that a call does, but drop its results."""
        compiled, engine, compiler = self._compiled, self._engine, self._compiler
        times: list[list[int]] = [[] for _ in self._program.lists]
        start = perf_counter()
        with HeldSignals():
            args, kwargs, targets = self._arguments
            options = compiler.options
            Batch.of(options.model, args, kwargs, targets, options.batch_dims)  # for its time
            micro = self._batch.in_parts(self._count)
            compiler.known(micro, Kind(compiled.purpose, engine.updates))
            traced = compiled.traced
            keep = frozenset({traced.loss}) if compiled.purpose == "step" else compiled.results
            host = BatchHost(traced, micro, keep, 0)  # type: ignore[arg-type]
            if compiled.purpose == "step":
                assert traced.loss is not None
                host.weigh_loss(compiled.plan.specs[traced.loss].dtype)
            weights = _Unchanged(compiled.plan, engine.progress.state_of(traced), self._updates)
            workers = engine._workers[: compiled.threads]
            run = FlushedRun(
                self._program, compiled.plan, workers, engine._backend, weights, times=times
            )
            run.feed(Job(self._kernels, host, None, [compiled.plan.specs] * self._count))
            run.advance(host.loss if compiled.purpose == "step" else lambda: None)
            if not all(machine.at_end for machine in run.machines):  # at the pause before backward
                edges = [e for e in compiled.plan.edges if e.gradient and e.target == HOST]
                values = [*dict.fromkeys(edge.value for edge in edges)]
                host.set_output_gradients(values, [None] * len(values))
                run.advance(lambda: None)
        return StepTimes(perf_counter() - start, times)

    def _optimizers(self, state: Mapping[str, Tensor]) -> Sequence[Optimizer | None]:
        """Stage → its optimizer, or a new one of this kind if the pipe has none yet."""
        progress, stages = self._engine.progress, self._compiled.plan.stages
        optimizer = self._compiler.options.optimizer
        if optimizer is None or self._compiled.purpose != "step":
            return [None] * len(stages)
        trained = [{a.target: state[a.target] for a in stage.parameters} for stage in stages]
        return progress.optimizers or [optimizer.of(named) if named else None for named in trained]


class _Unchanged(LiveWeights):
    """The model's weights, which neither updates nor commits change."""

    def __init__(
        self, plan: Plan, state: Mapping[str, Tensor], updates: Mapping[int, _Update]
    ) -> None:
        super().__init__(plan.stages, state, [None] * len(plan.stages), onto_grad=False)
        self._updates = updates

    def update(self, stage: int, reads: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Update the copies instead."""
        if gradients and stage in self._updates:
            self._updates[stage](gradients)
        return []

    def commit(
        self, state: Mapping[str, Tensor], gradients: Mapping[int, Sequence[Tensor | None]]
    ) -> None:
        """Write nothing to the model."""
        for update in self._updates.values():
            update.commit()


class _Update:
    """The update of copies of a stage's parameters, with an optimizer like the stage's.

    Attributes:
        share: the share of the parameters' elements that are copied and updated.
    """

    def __init__(self, stage: Stage, state: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        sizes = [state[argument.target].numel() for argument in stage.parameters]
        before = accumulate(sizes, initial=0)
        kept = [a for a, n in zip(stage.parameters, before, strict=False) if n < _SAMPLED]
        self.share = sum(sizes[: len(kept)]) / max(sum(sizes), 1)
        model = {a.target: state[a.target] for a in kept}
        copies = {n: nn.Parameter(t.detach().clone(), t.requires_grad) for n, t in model.items()}
        like = {id(tensor): copies[name] for name, tensor in model.items()}
        groups = [
            {**frozen(group), "params": [like[id(p)] for p in group["params"] if id(p) in like]}
            for group in optimizer.param_groups
        ]
        part = replace(stage, parameters=tuple(kept), buffers=(), writes=())
        self._weights = LiveWeights([part], copies, [alone(optimizer, groups)], onto_grad=False)
        self._count = len(kept)

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        self._weights.update(0, 0, gradients[: self._count])

    def commit(self) -> None:
        self._weights.commit({}, {})


def _flushing(schedule: Schedule) -> Schedule:
    """A schedule of one batch with a flush, all forwards first, with the library's tasks alone:
    overlapping batches, and tasks of the user's, would change what lasts."""
    again = {task.stage for row in schedule.rows for task in row if task.kind == "R"}
    halves = "I" in schedule.kinds

    def row(device: int) -> list[Task]:
        stages = [stage for stage, home in enumerate(schedule.placement) if home == device]
        tasks = [Task("F", i, s) for s in stages for i in range(schedule.microbatches)]
        for s in reversed(stages):
            for i in range(schedule.microbatches):
                tasks += [Task("R", i, s)] if s in again else []
                tasks += [Task(kind, i, s) for kind in ("IW" if halves else "B")]
        return [*tasks, *(Task("U", None, s) for s in stages)]

    rows = tuple(tuple(row(device)) for device in range(schedule.devices))
    return Schedule(schedule.name, schedule.microbatches, schedule.placement, rows)
