"""The result of a simulation, or of a measured run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fxpipe import views
from fxpipe.errors import InputError
from fxpipe.extensions.exchange import Exchange
from fxpipe.extensions.simulator.kept import KeptCounts, kept_of
from fxpipe.extensions.simulator.pairs import Pairs, joins
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.extensions.simulator.sums import beside
from fxpipe.extensions.tasks import Tasks, tasks_of
from fxpipe.formatting import plural
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.task import Task
from fxpipe.ir.value import Buffer
from fxpipe.verify.alone import window_of

if TYPE_CHECKING:
    from fxpipe.extensions.simulator.costs import Costs
    from fxpipe.extensions.simulator.memory import Memory


class Steady(NamedTuple):
    """What steps take in the long run.

    Attributes:
        period: the time of a step.
        bubble: the share of the devices' time that is idle.
    """

    period: float
    bubble: float


class TransferSpan(NamedTuple):
    """The transfer of a value from one device to another, or to the same device of other replicas.

    Attributes:
        buffer: the value, or what the replicas exchange, such as gradients.
        source: the device that sends it.
        target: the device that receives it.
        position: the position, in the device's list, of the instruction that sends it.
        ready: when it could leave.
        start: when it has the link for itself.
        end: when it has arrived.
    """

    buffer: Buffer | Exchange
    source: int
    target: int
    position: int
    ready: float
    start: float
    end: float


@dataclass(frozen=True)
class Events:
    """The times of all instructions and transfers.

    An instruction starts when the one before it is done. If it computes nothing, it ends when it
    has stopped waiting.

    Attributes:
        starts: device → the start of each instruction.
        ends: device → the end of each instruction.
        transfers: value → its transfer.
    """

    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]
    transfers: dict[Buffer | Exchange, TransferSpan] = field(default_factory=dict)

    def free(self, device: int) -> float:
        """The end of a device's last instruction."""
        return self.ends[device][-1] if self.ends[device] else 0


class Span(NamedTuple):
    """The time in which a device runs an instruction.

    Attributes:
        device: the device.
        start: when the instruction before it was done.
        end: when it is done; for a receive, when its value is there.
        instruction: the instruction.
        position: its index in its device's list of ``Simulation.program``.
    """

    device: int
    start: float
    end: float
    instruction: ins.Instruction
    position: int

    @property
    def time(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Simulation:
    """When everything in some steps of a program happens, in the unit of the costs.

    Attributes:
        program: the lists of all steps, one after another; batches and versions count from the
            first step.
        window: the program of one step.
        steps: how many steps.
        events: the times of all instructions and transfers.
        sizes: bytes of what devices hold, or None if they are not known.
        measured: whether it is a measured run.
        seconds: whether times are in seconds.
        serial: whether one thread computes for all devices, one after another.
        again: number of steps → the same simulation for so many.
        other: costs, links and sizes → the same simulation with these.
        pairs: the tasks that run together.
        launched: the lists in the order in which devices with streams launch them, arrivals ahead
            of the computations that they overlap; None without streams.
        slices: of its schedule, by which pictures name stages.
    """

    program: Program
    window: Program = field(repr=False)
    steps: int
    events: Events = field(repr=False)
    sizes: Sizes | None = field(default=None, repr=False)
    measured: bool = False
    seconds: bool = False
    serial: bool = False
    again: Callable[[int], Simulation] | None = field(default=None, repr=False, compare=False)
    other: Callable[..., Simulation] | None = field(default=None, repr=False, compare=False)
    pairs: Pairs = field(default_factory=dict, repr=False)
    launched: Program | None = field(default=None, repr=False, compare=False)
    slices: int = 1

    @property
    def devices(self) -> int:
        return self.program.devices

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The tasks, which are all instructions that compute, device by device, in order."""
        return tuple([span for span in self.instructions() if span.instruction.letter])

    @cached_property
    def joined(self) -> frozenset[tuple[int, int]]:
        """Device and position of each task that runs together with the forward before it."""
        return frozenset(
            (then.device, then.position)
            for first, then in pairwise(self.spans if self.pairs else ())
            if first.device == then.device
            if joins(first.instruction, then.instruction, self.pairs)
        )

    @property
    def transfers(self) -> tuple[TransferSpan, ...]:
        """What went from one device to another."""
        return tuple(self.events.transfers.values())

    def instructions(self) -> Iterator[Span]:
        """Every instruction, device by device, in order."""
        for device, list_ in enumerate(self.program.lists):
            times = zip(self.events.starts[device], self.events.ends[device], list_, strict=True)
            for position, (start, end, instruction) in enumerate(times):
                yield Span(device, start, end, instruction, position)

    @cached_property
    def makespan(self) -> float:
        """When the last instruction ends; updates count, too."""
        return max(map(self.events.free, range(self.devices)), default=0)

    @property
    def step_time(self) -> float:
        """The mean time of a step."""
        return self.makespan / self.steps

    @cached_property
    def through(self) -> float:
        """When the last micro-batch is through: the end of the last task of a micro-batch."""
        return max((span.end for span in self.spans if _of_microbatch(span)), default=0)

    @cached_property
    def bubble(self) -> float:
        """Share of the devices' time that is idle, until the last micro-batch is through.

        Updates after that do not count, as in the papers' (p − 1) / (m + p − 1).
        """
        busy = sum(max(min(span.end, self.through) - span.start, 0) for span in self.spans)
        return idle_share(busy, self.devices * self.through)

    @cached_property
    def bubble_size(self) -> float:
        """The most that a device idles between its first and last task of a micro-batch.

        The zero-bubble papers measure schedules by this, as a device may use the idle time before
        and after for other steps.
        """
        extents: dict[int, list[float]] = {}
        for span in filter(_of_microbatch, self.spans):
            extent = extents.setdefault(span.device, [span.start, 0, 0])
            extent[1] = span.end
            extent[2] += span.time
        return max((end - start - work for start, end, work in extents.values()), default=0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Device → the time of its tasks."""
        total: list[float] = [0] * self.devices
        for span in self.spans:
            total[span.device] += span.time
        return tuple(total)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """Device → its idle time until the last micro-batch is through, by cause."""
        return tuple(_idle_time(self, device) for device in range(self.devices))

    @cached_property
    def hidden(self) -> float:
        """The share of the time for sums of gradients and gathered weights in which their device
        does not wait for them. 1 if they take no time."""
        time = sum(t.end - t.start for t in self.transfers if isinstance(t.buffer, Exchange))
        spans, program = self.instructions(), self.program
        waited = sum(s.time for s in spans if s.instruction.awaits(program) is not None)
        return 1 - waited / time if time else 1.0

    def summed(self, replica: int = 0) -> tuple[int, ...]:
        """Device → the bytes that it sends in one replica to sum gradients over all replicas and,
        if optimizers or weights are sharded, to gather weights.

        Raises:
            InputError: no sizes were given.
        """
        if self.sizes is None:
            raise InputError("bytes of gradients need their sizes; simulate with sizes=")
        sent = [0] * self.devices
        for transfer in self.transfers:
            if isinstance(transfer.buffer, Exchange):
                sent[transfer.source] += transfer.buffer.sent(self.sizes, replica, self.program)
        return tuple(sent)

    @property
    def kept(self) -> tuple[int, ...]:
        """Stage → the most micro-batches that it keeps for backward at once."""
        return self._counts.stages

    @property
    def device_kept(self) -> tuple[int, ...]:
        """Device → the most micro-batches that its stages together keep for backward at once."""
        return self._counts.devices

    @cached_property
    def _counts(self) -> KeptCounts:
        return kept_of(window_of(self.window))

    @cached_property
    def weight_versions(self) -> tuple[int, ...]:
        """Stage → the most versions of its weights that are needed at once."""
        return _peak_versions(self.program)

    @cached_property
    def memory(self) -> tuple[Memory, ...]:
        """Device → its memory over time.

        Raises:
            InputError: no sizes were given.
        """
        from fxpipe.extensions.simulator.memory import memory_over_time

        if self.sizes is None:
            raise InputError("memory needs the bytes of what devices hold; simulate with sizes=")
        return memory_over_time(self, self.sizes)

    @cached_property
    def steady(self) -> Steady:
        """What steps take in the long run, by the later half of many.

        Raises:
            InputError: it is a measured run, which cannot go on.
        """
        if self.again is None:
            raise InputError("a measured run cannot go on; simulate the program with its costs")
        depth = self.window.depth
        half = 6 * (depth + 1)  # steps alternate, if at all, over as many as a task reaches back
        longer = self.again(2 * half + depth + 1)
        done: defaultdict[int, float] = defaultdict(float)
        for span in longer.spans:
            batch: int = span.instruction.batch
            done[batch] = max(done[batch], span.end)
        period = (done[2 * half] - done[half]) / half  # of batches before those of the flush
        work = sum(longer.busy) / longer.steps
        return Steady(period, idle_share(work, longer.devices * period))

    def with_costs(self, costs: Costs | None, **others: Any) -> Simulation:
        """The same steps with other costs, and with other ``links=`` or ``sizes=`` if these are
        given. Nothing is lowered again, so that many costs of one program take little time.

        Raises:
            InputError: as for ``simulate``; or it is a measured run.
        """
        if self.other is None:
            raise InputError("a measured run has no other costs; simulate the program with them")
        found = self.other(costs, **others)
        return replace(found, seconds=self.seconds, slices=self.slices)

    @cached_property
    def tasks(self) -> Tasks:
        """Letter and stage → the time of each of these tasks."""
        return tasks_of((span.instruction, span.time) for span in self.spans)

    @cached_property
    def costs(self) -> dict[tuple[str, int], float]:
        """Letter and stage → the mean time of these tasks, for ``simulate``'s ``costs``."""
        return {key: sum(spent) / len(spent) for key, spent in self.tasks.items()}

    draw = views.simulation_draw

    def trace(self, path: str | PathLike[str], *beside: Simulation) -> None:
        """Write a trace for https://ui.perfetto.dev, with other simulations beside this one.

        Raises:
            InputError: the file cannot be written.
        """
        from fxpipe.extensions.simulator.report import chrome_trace

        text = json.dumps(chrome_trace(self, *beside))
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"the trace cannot be written to {path}: {error.strerror}") from error

    def __str__(self) -> str:
        """A table: each device's work, idle time by cause, and what it holds."""
        from fxpipe.extensions.simulator.report import simulation_table

        return simulation_table(self)

    def __repr__(self) -> str:
        what = "measured" if self.measured else "simulated"
        counts = f"{plural(self.devices, 'device')}, {plural(self.steps, 'step')}"
        return f"<Simulation of {self.program.name}, {what}: {counts}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show notebooks the table."""
        printer.text(str(self))


def task_of(instruction: ins.Instruction) -> Task:
    """The task that an instruction runs, with its batch as the instruction counts it."""
    letter = instruction.letter
    assert letter is not None
    stage: int = instruction.stage
    microbatch: int | None = getattr(instruction, "microbatch", None)
    return Task(letter, microbatch, stage, instruction.batch)


def idle_share(busy: float, whole: float) -> float:
    """The share of a time that is not busy: at least 0, also where ``busy`` was rounded up."""
    return max(0.0, 1 - busy / whole) if whole else 0.0


def version_of(instruction: ins.Instruction) -> int:
    """The version of the weights that a task reads, or that an update makes."""
    version: int = getattr(instruction, "writes", getattr(instruction, "version", 0))
    return version


def _of_microbatch(span: Span) -> bool:
    return getattr(span.instruction, "microbatch", None) is not None


@dataclass(frozen=True)
class Idle:
    """A device's idle time by cause, from the start until the last micro-batch is through.

    What comes after that, such as updates, does not count. ``Simulation.bubble`` is the mean of
    ``total`` over the devices, as a share of the time until then.

    Attributes:
        warm_up: before its first task.
        drain: after its last task of a micro-batch; its updates are not idle.
        waiting: another device → waiting in between until that device has made what comes next.
        copying: another device → waiting in between for transfers from it or, in a measured run,
            to it; the device itself → for what it offloads or fetches.
        meeting: waiting in between until all devices have come to a barrier or a pause.
        summing: waiting in between until gradients are summed over the replicas, or weights
            gathered.
        other: the rest: instructions that compute nothing and, in a measured run, the time between
            instructions.
    """

    warm_up: float
    drain: float
    waiting: Mapping[int, float]
    copying: Mapping[int, float]
    meeting: float
    summing: float
    other: float

    @property
    def total(self) -> float:
        waits = sum(self.waiting.values()) + sum(self.copying.values())
        return self.warm_up + self.drain + waits + self.meeting + self.summing + self.other


def _idle_time(simulation: Simulation, device: int) -> Idle:
    """Return a device's idle time, from the start until the last micro-batch is through."""
    events, list_ = simulation.events, simulation.program.lists[device]
    through = simulation.through
    starts = [min(start, through) for start in events.starts[device]]
    ends = [min(end, through) for end in events.ends[device]]
    tasks = [position for position in range(len(ends)) if list_[position].letter]
    total = through - sum(ends[at] - starts[at] for at in tasks)
    if not tasks:
        return Idle(total, 0, {}, {}, 0, 0, 0)
    of_microbatch = [at for at in tasks if getattr(list_[at], "microbatch", None) is not None]
    first, last = tasks[0], (of_microbatch or tasks)[-1]
    after = sum(ends[at] - starts[at] for at in tasks if at > last)
    warm_up = starts[first]
    drain = through - ends[last] - after
    waiting: dict[int, float] = defaultdict(float)
    copying: dict[int, float] = defaultdict(float)
    meeting: float = 0
    summing: float = 0
    for position in range(first + 1, last):
        start, end = starts[position], ends[position]
        if end == start:
            continue
        match list_[position]:
            case ins.Receive(buffer):
                transfer = events.transfers[buffer]
                source = transfer.source
                made = max(start, min(transfer.ready, end))
                arrived = max(made, min(transfer.end, end))
                waiting[source] += made - start
                copying[source] += arrived - made
            case ins.Send(buffer):
                transfer = events.transfers[buffer]
                copying[transfer.target] += max(min(transfer.end, end) - start, 0)
            case ins.Barrier() | ins.Pause():
                meeting += end - start
            case x if x.awaits(simulation.program) is not None:
                summing += end - start
            case x if beside(x) is not None:
                copying[device] += end - start
    known = warm_up + drain + sum(waiting.values()) + sum(copying.values()) + meeting + summing
    waiting, copying = ({d: t for d, t in times.items() if t} for times in (waiting, copying))
    return Idle(warm_up, drain, waiting, copying, meeting, summing, max(total - known, 0))


def _peak_versions(program: Program) -> tuple[int, ...]:
    """Stage → the most versions of its weights that are needed at once, in a run of all steps: the
    newest, and the older ones that something reads after its update."""
    most = [1] * program.stages
    for list_ in program.lists:
        readers = [(at, x) for at, x in enumerate(list_) if "version" in x.counted]
        last_read = {(x.stage, getattr(x, "version", 0)): at for at, x in readers}
        existing: dict[int, list[int]] = {}
        for at, x in enumerate(list_):
            if isinstance(x, ins.Update):
                older = existing.get(x.stage, [0])
                older = [version for version in older if last_read.get((x.stage, version), -1) > at]
                most[x.stage] = max(most[x.stage], len(older) + 1)
                existing[x.stage] = [*older, x.writes]
    return tuple(most)
