"""Time the tasks of a plan as they run, for simulations.

Tasks are timed on the pipe's own threads: those of each device alone, and then those of all devices
side by side, where they share the memory's bandwidth and the interpreter lock. Nothing of it
changes the model.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from queue import SimpleQueue
from statistics import median, quantiles
from threading import Event
from time import perf_counter
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.options import Options
from fxpipe.engine import Engine
from fxpipe.errors import told
from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.value import gradient_groups, outputs_of
from fxpipe.kernels.kernel import Forwarded
from fxpipe.log import noted
from fxpipe.overheads import overheads
from fxpipe.runtime.batch import MicroBatches
from fxpipe.runtime.devices.backend import Worker
from fxpipe.runtime.host import BatchHost
from fxpipe.runtime.weights.live import LiveWeights
from fxpipe.runtime.weights.optimizer_copies import alone, frozen
from fxpipe.signals import SignalsAtOperations
from fxpipe.simulator.analysis import peak_stash
from fxpipe.simulator.costs import Rehearsal, Spread
from fxpipe.simulator.simulation import Simulation, task_of

Key = tuple[str, int]

_ROUNDS, _LEAST = 3, 5e-3
"""How often all tasks run in a phase at least, and for how many seconds."""

_PHASES, _MOST = 8, 0.5
"""Phases at most, and seconds after which no further one begins; the first one warms up."""

_STABLE = 0.02
"""By which share the sum of the medians changes at most in the last phase, unless time is up."""

_SAMPLED = 1 << 22
"""Elements of a stage's parameters after which no further one is updated; the time is scaled."""

_BEGINS = 5
"""How often the beginning of a step is timed."""


class Rehearsals:
    """The rehearsals of a pipe's plans, each made when somebody asks for it."""

    def __init__(self, options: Options, compiler: Compiler, engine: Engine) -> None:
        """Nothing is rehearsed yet."""
        self._options = options
        self._compiler = compiler
        self._engine = engine
        # the kernel of the first stage identifies the plan
        self._made: WeakKeyDictionary[Any, Rehearsal] = WeakKeyDictionary()

    def of(self, compiled: Compiled) -> Rehearsal | None:
        """The times of a call's tasks; None where they are not known and cannot be taken now."""
        first, options, engine = compiled.plan.stages[0].kernel, self._options, self._engine
        if first in self._made:
            return self._made[first]
        unknown = compiled.traced.leaves or options.hollow or not engine.flushed
        if unknown or not self._on_processors:
            return None
        try:
            engine.check()
            with engine.quiet():
                self._made[first] = rehearse(
                    compiled,
                    self._compiler.plans.example(compiled.traced, compiled.samples),
                    engine.progress.state_of(compiled.traced),
                    engine.progress.optimizers_of(compiled.plan),
                    engine._workers[: compiled.threads],
                    self._beginning(compiled),
                )
        except Exception as error:
            noted(f"tasks are not timed as they run: {told(error)}")
        return self._made.get(first)

    def learn(self, compiled: Compiled, measured: Simulation, seconds: float) -> None:
        """Take the times of a real run, whose steps took so many seconds each, from now on."""
        if not self._on_processors:
            return
        first, serial = compiled.plan.stages[0].kernel, compiled.threads == 1
        known = self._made.get(first) or Rehearsal({}, {}, overheads(), serial)
        task = known.overheads.task  # is in the times already
        times: dict[Key, list[float]] = defaultdict(list)
        for span in measured.spans:
            run = task_of(span.instruction)
            assert run.stage is not None
            times[run.kind, run.stage].append(max(span.time - task, 0.0))
        own = {key: _quartiles(all_) for key, all_ in times.items()}
        step = max(seconds - measured.makespan / measured.steps, 0.0)
        self._made[first] = replace(
            known,
            alone={**known.alone, **own},
            together={**known.together, **own},
            overheads=replace(known.overheads, step=step),
        )

    @property
    def _on_processors(self) -> bool:
        """Whether this process runs all devices, and they are CPUs."""
        return self._options.group.size == 1 and not self._options.places

    def _beginning(self, compiled: Compiled) -> Callable[[], object]:
        """Does what a step does before its first instruction, with zeros for a batch."""
        batch = self._compiler.plans.graph_of(compiled.traced).call.zeros().batch
        count, none = compiled.schedule.microbatches, [None] * len(compiled.plan.stages)

        def begin() -> None:
            with SignalsAtOperations():
                micro = MicroBatches(batch, batch.split(count), [1 / count] * count)
                self._compiler.known(micro, compiled.purpose, updates=self._engine.updates)
                host = BatchHost(compiled.traced, micro, frozenset(), 0)
                if compiled.purpose == "step":
                    host.weigh_loss(torch.float32)
                state = self._engine.progress.state_of(compiled.traced)
                self._engine._flushed(compiled, host, state, none, onto_grad=False)

        return begin if batch.size >= count else lambda: None


class _Timed(Protocol):
    times: dict[Key, list[float]]

    def run(self) -> None: ...


class _Tasks:
    """A stage that runs a micro-batch again and again, and takes the times of its tasks."""

    def __init__(
        self,
        plan: Plan,
        stage: Stage,
        state: Mapping[str, Tensor],
        found: dict[str, Any],
        letters: Collection[str],
        most: int,
    ) -> None:
        """Run its forward once.

        Args:
            found: value → what it is; those that the stage makes are added.
            letters: the kinds of tasks that are wanted.
            most: how many micro-batches it keeps at once: what is long ago is in no cache.
        """
        assert stage.kernel is not None
        self._kernel, self._index = stage.kernel, stage.index
        self._parameters = [state[a.target] for a in stage.parameters]
        self._buffers = [state[a.target] for a in stage.buffers]
        self._inputs = [found[edge.value] for edge in plan.edges_into(stage.index)]
        self._totals: Any = ()
        self._kept: deque[list[Any]] = deque(maxlen=max(most, 1))
        self._most = most
        self._backwards = [letter for letter in "BI" if letter in letters]
        self.times: dict[Key, list[float]] = defaultdict(list)
        outputs = self._forward().outputs
        names = outputs_of(plan.edges_from(stage.index))
        found.update(zip(names, outputs, strict=True))
        groups = gradient_groups(plan.edges_from(stage.index))
        self._gradients = [torch.ones_like(found[group[0].value]) for group in groups]

    def run(self) -> None:
        """A micro-batch's forward, and as soon as enough are kept, the backward of the first."""
        while len(self._kept) < self._most - 1:
            self._kept.append(self._forward().saved)
        for letter in self._backwards or "F":
            start = perf_counter()
            self._kept.append(self._forward().saved)
            middle = perf_counter()
            self.times["F", self._index].append(middle - start)
            if letter == "F":
                continue
            saved, gradients = self._kept.popleft(), [*self._gradients]
            middle = perf_counter()
            if letter == "B":
                made = self._kernel.backward(saved, gradients, self._totals)
                self._totals = made.parameters
                self.times["B", self._index].append(perf_counter() - middle)
            else:
                _, deferred = self._kernel.input_grad(saved, gradients)
                after = perf_counter()
                self._totals = self._kernel.weight_grad(deferred, self._totals)
                self.times["I", self._index].append(after - middle)
                self.times["W", self._index].append(perf_counter() - after)

    def _forward(self) -> Forwarded:
        return self._kernel.forward(self._parameters, self._buffers, [*self._inputs])


class _Update:
    """The update of a stage on copies of its parameters, with an optimizer like its own."""

    def __init__(self, stage: Stage, state: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        sizes = [state[argument.target].numel() for argument in stage.parameters]
        before = accumulate(sizes, initial=0)
        kept = [a for a, n in zip(stage.parameters, before, strict=False) if n < _SAMPLED]
        self._share = sum(sizes[: len(kept)]) / max(sum(sizes), 1)
        own = {a.target: state[a.target] for a in kept}
        copies = {n: nn.Parameter(t.detach().clone(), t.requires_grad) for n, t in own.items()}
        like = {id(tensor): copies[name] for name, tensor in own.items()}
        groups = [
            {**frozen(group), "params": [like[id(p)] for p in group["params"] if id(p) in like]}
            for group in optimizer.param_groups
        ]
        part = replace(stage, parameters=tuple(kept), buffers=(), writes=())
        self._weights = LiveWeights([part], copies, [alone(optimizer, groups)], onto_grad=False)
        self._gradients = [
            torch.full_like(each, 1e-3) if each.requires_grad else None for each in copies.values()
        ]
        self._index = stage.index
        self.times: dict[Key, list[float]] = defaultdict(list)

    def run(self) -> None:
        """Update, and commit."""
        start = perf_counter()
        self._weights.update(0, 0, 1, self._gradients)
        self.times["U", self._index].append((perf_counter() - start) / self._share)
        self._weights.commit({}, {})


def rehearse(
    compiled: Compiled,
    values: Mapping[str, Any],
    state: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer | None],
    workers: Sequence[Worker],
    begin: Callable[[], object],
) -> Rehearsal:
    """Time the tasks of a compiled call on CPU devices; nothing changes.

    Args:
        compiled: its stages run on one micro-batch.
        values: the inputs of a micro-batch, by name.
        state: name in the model → parameter, buffer or constant.
        optimizers: stage → its optimizer; None where it has none.
        workers: the threads that run the devices' lists, which are idle.
        begin: makes what a call is given before its first instruction.
    """
    plan, placement = compiled.plan, compiled.schedule.placement
    letters = {*filter(None, (ins.letter_of(x) for own in compiled.program.lists for x in own))}
    found = dict(values)
    stages: list[list[_Timed]] = [[] for _ in workers]
    updates: list[list[_Timed]] = [[] for _ in workers]
    stop, (most, _) = Event(), peak_stash(compiled.program)

    def prepare() -> None:
        for stage in plan.stages:
            home, optimizer = placement[stage.index] % len(workers), optimizers[stage.index]
            stages[home].append(_Tasks(plan, stage, state, found, letters, most[stage.index]))
            if optimizer is not None and stage.parameters and "U" in letters:
                updates[home].append(_Update(stage, state, optimizer))

    _run({workers[0]: prepare}, stop)
    together = _stable({w: own for w, own in zip(workers, stages, strict=True) if own}, stop)
    alone_: dict[Key, Spread] = {}
    for worker, own in zip(workers, stages, strict=True) if len(workers) > 1 else ():
        alone_ |= _stable({worker: own}, stop)
    # among other tasks, after which neither its code nor its data is in a cache
    among = {w: a + b for w, a, b in zip(workers, stages, updates, strict=True) if a + b}
    timed = _stable(among, stop) if any(updates) else {}
    together |= {key: own for key, own in timed.items() if key[0] == "U"}
    starts = []
    for _ in range(_BEGINS):
        start = perf_counter()
        begin()
        starts.append(perf_counter() - start)
    known = overheads()
    known = replace(known, step=known.step + median(starts))
    return Rehearsal(together | alone_, together, known, serial=len(workers) == 1)


def _stable(lists: Mapping[Worker, Sequence[_Timed]], stop: Event) -> dict[Key, Spread]:
    """Run lists side by side until the sum of their tasks' medians hardly changes any more."""
    taken: dict[Key, list[float]] = defaultdict(list)
    before, latest = 0.0, perf_counter() + _MOST
    for phase in range(_PHASES if lists else 0):
        left = dict.fromkeys(lists, _ROUNDS)
        every = [each for own in lists.values() for each in own]

        def loop(worker: Worker, left: dict[Worker, int] = left) -> None:
            end = perf_counter() + _LEAST
            while not stop.is_set() and (max(left.values()) > 0 or perf_counter() < end):
                for each in lists[worker]:
                    each.run()
                left[worker] -= 1

        for each in every:
            each.times.clear()
        _run({worker: partial(loop, worker) for worker in lists}, stop)
        if not phase:
            continue  # it has warmed up
        for each in every:
            for key, times in each.times.items():
                taken[key] += times
        now = sum(map(median, taken.values()))
        if abs(now - before) <= _STABLE * now or perf_counter() > latest:
            break
        before = now
    return {key: _quartiles(times) for key, times in taken.items()}


def _run(jobs: Mapping[Worker, Callable[[], None]], stop: Event) -> None:
    """Run each on its worker, and wait for all. Raises what one of them raises."""
    done: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(job: Callable[[], None]) -> None:
        try:
            job()
            done.put(None)
        except BaseException as error:
            stop.set()
            done.put(error)

    for worker, job in jobs.items():
        worker.submit(partial(run, job))
    left = len(jobs)
    try:
        while left:
            error = done.get()
            left -= 1
            if error is not None:
                raise error
    finally:
        stop.set() if left else None
        for _ in range(left):
            done.get()


def _quartiles(times: Sequence[float]) -> Spread:
    low, middle, high = quantiles(times, n=4, method="inclusive") if times[1:] else [*times] * 3
    return low, middle, high
