"""When tasks and instructions run, as pictures and grids show it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

from fxpipe.draw.marks import Marks, faults_of, mark
from fxpipe.errors import Fault
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import BUILT_IN, KINDS, Task
from fxpipe.ir.walk import Place, Wait, Waits, needs_of, walk
from fxpipe.simulator.costs import Costs, times_of
from fxpipe.simulator.simulate import chain_program, simulate
from fxpipe.simulator.simulation import Simulation, task_of

T = TypeVar("T")

_UNKNOWN_TIME = 1.0


@dataclass(frozen=True, slots=True)
class Span(Generic[T]):
    """A task, or an instruction, on a row from its start to its end.

    Attributes:
        device: the row, which is a device where it does one thing after another.
        position: its index in the row.
        start: when it starts.
        end: when it ends.
        task: what it is.
    """

    device: int
    position: int
    start: float
    end: float
    task: T


@dataclass(frozen=True)
class Timeline(Generic[T]):
    """All that runs, and where the devices are stuck.

    Attributes:
        devices: how many there are.
        spans: what runs, device by device in its order.
        unrun: what never runs, device by device, one behind the other from when the device waits.
        bubble: share of the devices' time that is idle, of what was simulated.
    """

    devices: int
    spans: tuple[Span[T], ...]
    unrun: tuple[Span[T], ...] = ()
    bubble: float | None = None

    @cached_property
    def stuck(self) -> tuple[Span[T], ...]:
        """The task at which each stuck device waits for ever."""
        first: dict[int, Span[T]] = {}
        for span in self.unrun:
            first.setdefault(span.device, span)
        return tuple(first.values())

    @cached_property
    def end(self) -> float:
        """When the last task ends, with those that never run."""
        return max((span.end for span in (*self.spans, *self.unrun)), default=0.0)


def simulated(simulation: Simulation, unit: float = 1.0) -> Timeline[Task]:
    """The tasks of a simulation, at so many units of the picture in one of its own."""
    spans = tuple(
        [
            Span(s.device, s.position, s.start * unit, s.end * unit, task_of(s.instruction))
            for s in simulation.spans
        ]
    )
    return Timeline(simulation.devices, spans, (), simulation.bubble)


def timeline_of(
    schedule: Schedule,
    costs: Costs | None = None,
    steps: int | None = None,
    faults: Sequence[Fault] | None = None,
) -> tuple[Timeline[Task], int, Marks]:
    """When a schedule's tasks run, valid or not, if communication takes no time.

    A valid one is simulated. One that has faults is shown as far as it comes: one window in the
    midst of others, for the positions of faults are those of a window.

    Args:
        schedule: what to run.
        costs: letter of a kind of task, or letter and stage → its time; by default its kind's.
        steps: how many steps, and the flush behind them; by default as many as show what it does.
        faults: what to mark; by default what the verifier finds.

    Returns:
        The timeline; its steps, with batches counted from the first, or 0 for one window; and what
        is marked.
    """
    wrong = faults_of(schedule)
    marks = mark(wrong if faults is None else faults)
    if wrong or marks.faults:
        return _refused(schedule, costs), 0, marks
    count = default_steps(schedule) if steps is None else steps
    program = chain_program(schedule, frees=False)
    return simulated(simulate(program, costs, steps=max(count, 1))), count, marks


def default_steps(schedule: Schedule) -> int:
    """How many steps show what a schedule does; 0 for one window, where no batches overlap."""
    return schedule.depth + 2 + max(schedule.delays, default=0) if schedule.overlaps else 0


def sketch(rows: Sequence[Sequence[T]], cost: Callable[[T], float], waits: Waits) -> Timeline[T]:
    """Run rows on paper, right or not: each item as soon as the one before it in its row is done,
    and all that it waits for is."""
    awaited: defaultdict[Place, list[Place]] = defaultdict(list)
    for row, own in enumerate(waits):
        for position, other, on in own:
            awaited[Place(row, position)].append(Place(other, on))
    ends: list[list[float]] = [[] for _ in rows]
    spans: list[list[Span[T]]] = [[] for _ in rows]
    for row, stop in walk(list(map(len, rows)), waits).turns:
        for position in range(len(ends[row]), stop):
            item = rows[row][position]
            before = [ends[other][on] for other, on in awaited.get(Place(row, position), ())]
            start = max([ends[row][-1] if position else 0.0, *before])
            ends[row].append(start + cost(item))
            spans[row].append(Span(row, position, start, ends[row][-1], item))
    unrun: list[Span[T]] = []
    for row, items in enumerate(rows):
        free = ends[row][-1] if ends[row] else 0.0
        for position in range(len(ends[row]), len(items)):
            start, free = free, free + cost(items[position])
            unrun.append(Span(row, position, start, free, items[position]))
    return Timeline(len(rows), tuple(span for own in spans for span in own), tuple(unrun))


def _refused(schedule: Schedule, costs: Costs | None) -> Timeline[Task]:
    """One window of a schedule that has faults.

    What an earlier window should have run has run. Updates wait for all that comes before them on
    their stage, or where no batches overlap on every device.
    """
    times = times_of(schedule.stages, schedule.kinds, costs)
    flush = not schedule.overlaps
    orders = [_run_order(row, flush) for row in schedule.rows]
    rows = [[row[at] for at in own] for row, own in zip(schedule.rows, orders, strict=True)]

    def cost(task: Task) -> float:
        usual = KINDS[task.kind].cost if task.kind in KINDS else _UNKNOWN_TIME
        return times.get((task.kind, -1 if task.stage is None else task.stage), usual)

    timeline = sketch(rows, cost, _waits(schedule, rows))
    ran, unrun = (
        tuple(replace(span, position=orders[span.device][span.position]) for span in spans)
        for spans in (timeline.spans, timeline.unrun)
    )
    return Timeline(timeline.devices, ran, unrun)


def _run_order(row: Sequence[Task], flush: bool) -> list[int]:
    """The positions of a row's tasks in the order in which they run.

    Where every step ends with a flush, updates, and tasks once a step behind one, come last: they
    wait for all devices.
    """
    late: list[int] = []
    for position, task in enumerate(row):
        if flush and (task.kind == "U" or (late and task.kind not in BUILT_IN)):
            late.append(position)
    behind = set(late)
    return [position for position in range(len(row)) if position not in behind] + late


def _waits(schedule: Schedule, rows: Sequence[Sequence[Task]]) -> list[list[Wait]]:
    """What each task waits for: where it is, or for ever where nothing brings what it reads."""
    flush, needs = not schedule.overlaps, needs_of(schedule)
    places: dict[Task, Place] = {}
    # Stage (None for any) and batch → device → its last task before the updates.
    last: defaultdict[tuple[int | None, int], dict[int, int]] = defaultdict(dict)
    updated: set[tuple[int, int]] = set()
    for device, row in enumerate(rows):
        for position, task in enumerate(row):
            places.setdefault(task, Place(device, position))
            if task.kind == "U":
                updated.add((device, task.batch))
            if (device, task.batch) not in updated:
                for stage in (task.stage, None):
                    last[stage, task.batch][device] = position

    def waits(task: Task, here: Place) -> list[Place]:
        if task.kind == "U":
            return [Place(*x) for x in last[None if flush else task.stage, task.batch].items()]
        if task.stage is None or task.kind not in KINDS:
            return []
        needed = [
            Task(kind, i, stage, task.batch)
            for kind, i, stage in needs((task.kind, task.microbatch, task.stage))
        ]
        found = [places[x] for x in needed if x in places]
        if task.batch >= 0 and task.microbatch is not None:
            stages = range(schedule.stages)
            brings = [x for x in needed if x.stage != task.stage and x.stage in stages]
            if brings and not any(x in places for x in brings):
                found.append(here)
        return found

    return [
        sorted(
            (position, *on)
            for position, task in enumerate(row)
            for on in waits(task, Place(device, position))
        )
        for device, row in enumerate(rows)
    ]
