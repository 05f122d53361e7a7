"""Timelines of tasks and instructions, which pictures and grids show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from fxpipe.draw.chart import Marks, faults_of, mark
from fxpipe.errors import Fault
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import BUILT_IN, KINDS, Task
from fxpipe.ir.unroll import unroll_schedule
from fxpipe.ir.value import Buffer
from fxpipe.ir.walk import Place, Wait, Waits, needs_of, part_of, walk
from fxpipe.simulator.costs import Costs, times_of
from fxpipe.simulator.simulate import chain_program, simulate
from fxpipe.simulator.simulation import Simulation, idle_share, task_of

T = TypeVar("T")

_UNKNOWN_TIME = 1.0


class Span(NamedTuple, Generic[T]):
    """A task or an instruction with its start and end.

    ``device`` is its row, which is a device or one stream of it, and ``position`` its index there.
    """

    device: int
    position: int
    start: float
    end: float
    task: T


@dataclass(frozen=True)
class Timeline(Generic[T]):
    """Everything that runs in some rows, row by row in order, and what never runs.

    Attributes:
        devices: the number of rows.
        spans: what runs.
        unrun: what never runs, from when its row waits for ever.
        bubble: the idle fraction of the devices' time; None where nothing was simulated.
        beside: for each of the last rows the device beside which it runs, and the letter of what
            runs there.
    """

    devices: int
    spans: tuple[Span[T], ...]
    unrun: tuple[Span[T], ...] = ()
    bubble: float | None = None
    beside: tuple[tuple[int, str], ...] = ()

    @cached_property
    def stuck(self) -> tuple[Span[T], ...]:
        """The task at which each stuck device waits for ever."""
        first: dict[int, Span[T]] = {}
        for span in self.unrun:
            first.setdefault(span.device, span)
        return tuple(first.values())

    @cached_property
    def end(self) -> float:
        """When the last task ends, including those that never run."""
        return max((span.end for span in (*self.spans, *self.unrun)), default=0.0)


def simulated(simulation: Simulation, unit: float = 1.0) -> Timeline[Task]:
    """The tasks of a simulation, with its times multiplied by ``unit``."""
    spans = [
        Span(s.device, s.position, s.start * unit, s.end * unit, task_of(s.instruction))
        for s in simulation.spans
    ]
    letters = {"offloaded": "O", "fetching": "P"}
    moved = [t for t in simulation.transfers if t.buffer.kind in letters]
    beside = sorted({(t.source, letters[t.buffer.kind]) for t in moved})
    for t in moved:
        assert isinstance(t.buffer, Buffer)
        letter, (_, _, stage, _, i, batch) = letters[t.buffer.kind], t.buffer
        row, task = (
            simulation.devices + beside.index((t.source, letter)),
            Task(letter, i, stage, batch),
        )
        spans.append(Span(row, t.position, t.start * unit, t.end * unit, task))
    rows = simulation.devices + len(beside)
    return Timeline(rows, tuple(spans), (), simulation.bubble, tuple(beside))


def timeline_of(
    schedule: Schedule,
    costs: Costs | None = None,
    steps: int | None = None,
    faults: Sequence[Fault] | None = None,
) -> tuple[Timeline[Task], int, Marks]:
    """The timeline of a schedule, valid or not, with communication that takes no time.

    A valid schedule has the times of its simulation. One with faults is shown as far as it runs, as
    one window in steady state, since the positions of faults are positions in a window.

    Returns the timeline; the number of its steps, or 0 for one window; and the faults to mark,
    which by default are what the verifier finds.
    """
    marks = mark(faults_of(schedule) if faults is None else faults)
    count = 0 if marks.faults else default_steps(schedule) if steps is None else steps
    if faults is None and not marks.faults and schedule.overlaps and "C" in schedule.kinds:
        # in the flush, what receives a norm may stand a few tasks before the clip that reads it
        program = chain_program(schedule, frees=False)
        return simulated(simulate(program, costs, steps=count)), count, marks
    if not marks.faults and "O" in schedule.kinds:  # they run beside the others of their device
        found = simulate(chain_program(schedule), costs, steps=count or None)
        return simulated(found), count, marks
    timeline = _run(schedule, costs, count)
    if marks.faults or timeline.unrun:
        return timeline, count, marks
    through = max((s.end for s in timeline.spans if s.task.microbatch is not None), default=0)
    times = [(s.start, s.end) for s in timeline.spans]
    return replace(timeline, bubble=idle_share(timeline.devices, times, through)), count, marks


def default_steps(schedule: Schedule) -> int:
    """How many steps to show by default; 0 for one window, where no batches overlap."""
    return schedule.depth + 2 + max(schedule.delays, default=0) if schedule.overlaps else 0


def sketch(rows: Sequence[Sequence[T]], cost: Callable[[T], float], waits: Waits) -> Timeline[T]:
    """The timeline of rows, valid or not: each item runs as soon as the item before it in its row
    and everything that it waits for are done."""
    ends: list[list[float]] = [[] for _ in rows]
    spans: list[list[Span[T]]] = [[] for _ in rows]
    waited = [0] * len(rows)
    for row, stop in walk(list(map(len, rows)), waits).turns:
        own, number, done = waits[row], waited[row], ends[row]
        for position in range(len(done), stop):
            start = done[-1] if done else 0.0
            while number < len(own) and own[number][0] == position:
                _, other, on = own[number]
                start = max(start, ends[other][on])
                number += 1
            item = rows[row][position]
            done.append(start + cost(item))
            spans[row].append(Span(row, position, start, done[-1], item))
        waited[row] = number
    unrun: list[Span[T]] = []
    for row, items in enumerate(rows):
        free = ends[row][-1] if ends[row] else 0.0
        for position in range(len(ends[row]), len(items)):
            start, free = free, free + cost(items[position])
            unrun.append(Span(row, position, start, free, items[position]))
    return Timeline(len(rows), tuple([span for own in spans for span in own]), tuple(unrun))


def _run(schedule: Schedule, costs: Costs | None, steps: int) -> Timeline[Task]:
    """So many steps and the flush behind them; or, for 0, one window in the midst of others.

    What an earlier window should have run has run. Updates wait for all that comes before them on
    their stage, or where no batches overlap on every device.
    """
    times = times_of(schedule.stages, schedule.kinds, costs)
    orders = [_run_order(row, not schedule.overlaps) for row in schedule.rows]
    rows = tuple(
        tuple([row[at] for at in own]) for row, own in zip(schedule.rows, orders, strict=True)
    )
    if steps:
        rows = unroll_schedule(replace(schedule, rows=rows), steps).rows

    def cost(task: Task) -> float:
        key = task.kind, -1 if task.stage is None else task.stage
        if key in times:
            return times[key]
        return KINDS[task.kind].cost if task.kind in KINDS else _UNKNOWN_TIME

    timeline = sketch(rows, cost, _waits(schedule, rows))
    if steps or all(own == sorted(own) for own in orders):
        return timeline
    ran, unrun = (
        tuple([span._replace(position=orders[span.device][span.position]) for span in spans])
        for spans in (timeline.spans, timeline.unrun)
    )
    return Timeline(timeline.devices, ran, unrun)


def _run_order(row: Sequence[Task], flush: bool) -> list[int]:
    """The positions of a row's tasks in the order in which they run.

    Where every step ends with a flush, updates come last, with the once-per-step tasks after them:
    they wait for all devices.
    """
    first: list[int] = []
    late: list[int] = []
    for position, task in enumerate(row):
        waits = flush and (task.kind == "U" or (late and task.kind not in BUILT_IN))
        (late if waits else first).append(position)
    return first + late


def _waits(schedule: Schedule, rows: Sequence[Sequence[Task]]) -> list[list[Wait]]:
    """What each task waits for: where it is, or for ever where nothing brings what it reads.

    What comes before it in its row is over anyway.
    """
    flush, needs, stages = not schedule.overlaps, needs_of(schedule), schedule.stages
    places: dict[tuple[str, int | None, int | None, int], Place] = {}
    # Stage (None for any) and batch → device → its last task before the updates.
    last: defaultdict[tuple[int | None, int], dict[int, int]] = defaultdict(dict)
    updated: set[tuple[int, int]] = set()
    for device, row in enumerate(rows):
        for position, task in enumerate(row):
            stage, batch = task.stage, task.batch
            key = task.kind, part_of(schedule, task, device), stage, batch
            places.setdefault(key, Place(device, position))
            if task.kind == "U":
                updated.add((device, batch))
            if (device, batch) not in updated:
                last[stage, batch][device] = last[None, batch][device] = position

    def awaited(task: Task, here: Place) -> list[Place]:
        stage, batch = task.stage, task.batch
        if task.kind == "U":
            return [Place(*x) for x in last[None if flush else stage, batch].items()]
        if stage is None or task.kind not in KINDS:
            return []
        found: list[Place] = []
        brought: bool | None = None  # whether a neighbour brings what it reads, if one has to
        for kind, i, there in needs((task.kind, part_of(schedule, task, here.device), stage)):
            on = places.get((kind, i, there, batch))
            if on is not None:
                found.append(on)
            if there != stage and 0 <= there < stages:
                brought = brought or on is not None
        if brought is False and batch >= 0 and task.microbatch is not None:
            found.append(here)
        return found

    return [
        [
            (position, other, on)
            for position, task in enumerate(row)
            for other, on in awaited(task, Place(device, position))
            if other != device or on >= position
        ]
        for device, row in enumerate(rows)
    ]
