"""Timelines: when tasks and instructions run, for pictures and grids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from fxpipe.errors import InputError
from fxpipe.extensions.draw.chart import FaultMarks, marks_of
from fxpipe.extensions.simulator.chain import chain_program
from fxpipe.extensions.simulator.costs import Costs, each_of, times_of
from fxpipe.extensions.simulator.pairs import pairs_in
from fxpipe.extensions.simulator.simulate import simulate
from fxpipe.extensions.simulator.simulation import Simulation, task_of
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task, usual_cost
from fxpipe.ir.value import Buffer
from fxpipe.ir.walk import Place, Wait, Waits, key_index, needs_of, walk

T = TypeVar("T")


class Bar(NamedTuple, Generic[T]):
    """A task or an instruction with its start and end.

    ``device`` is its row, a device or one stream of it, and ``position`` its index in the row.
    """

    device: int
    position: int
    start: float
    end: float
    task: T


@dataclass(frozen=True)
class Timeline(Generic[T]):
    """All tasks or instructions of some rows, row by row in order.

    Attributes:
        devices: the number of rows.
        spans: those that run.
        unrun: those that never run, drawn from the time at which their row waits for ever.
        simulation: the simulation that the times come from, if any.
        beside: the device and the letter (O or P) of each of the last rows, which hold offloads
            and prefetches.
        joined: device and position of each task that runs together with the forward before it.
    """

    devices: int
    spans: tuple[Bar[T], ...]
    unrun: tuple[Bar[T], ...] = ()
    simulation: Simulation | None = None
    beside: tuple[tuple[int, str], ...] = ()
    joined: frozenset[tuple[int, int]] = frozenset()

    @property
    def steps(self) -> int:
        """How many steps were simulated, with batches numbered from 0; 0 for one window."""
        return 0 if self.simulation is None else self.simulation.steps

    @property
    def bars(self) -> tuple[Bar[T], ...]:
        """All of them."""
        return (*self.spans, *self.unrun)

    @cached_property
    def stuck(self) -> tuple[Bar[T], ...]:
        """The task at which each stuck device waits for ever."""
        first: dict[int, Bar[T]] = {}
        for span in self.unrun:
            first.setdefault(span.device, span)
        return tuple(first.values())

    @cached_property
    def end(self) -> float:
        """When the last task ends, including those that never run."""
        return max((span.end for span in self.bars), default=0.0)


def simulated(simulation: Simulation, unit: float = 1.0) -> Timeline[Task]:
    """The timeline of a simulation, with its times multiplied by ``unit``."""
    spans = [
        Bar(s.device, s.position, s.start * unit, s.end * unit, task_of(s.instruction))
        for s in simulation.spans
    ]
    letters = {"offloaded": "O", "fetching": "P"}
    moves = [t for t in simulation.transfers if t.buffer.kind in letters]
    beside = sorted({(t.source, letters[t.buffer.kind]) for t in moves})
    for t in moves:
        assert isinstance(t.buffer, Buffer)
        letter, (_, _, stage, _, i, batch) = letters[t.buffer.kind], t.buffer
        row = simulation.devices + beside.index((t.source, letter))
        task = Task(letter, i, stage, batch)
        spans.append(Bar(row, t.position, t.start * unit, t.end * unit, task))
    rows = simulation.devices + len(beside)
    return Timeline(rows, tuple(spans), (), simulation, tuple(beside), simulation.joined)


def timeline_of(
    schedule: Schedule, costs: Costs | None = None, steps: int | None = None
) -> tuple[Timeline[Task], FaultMarks]:
    """Return the timeline of a schedule, valid or not, and its faults.

    Communication takes no time. A valid schedule is simulated; an invalid one is one window in
    steady state, as far as it runs, since faults are at positions in a window.

    Raises:
        InputError: a letter or stage of ``costs`` is unknown, or a time negative or not finite;
            ``steps`` is below 1.
    """
    if steps is not None and steps < 1:
        raise InputError(f"steps is {steps}; show at least 1")
    marks = marks_of(schedule)
    if marks.faults:
        return _refused(schedule, costs), marks
    steps = steps_to_show(schedule) if steps is None else steps
    program, pairs = chain_program(schedule), pairs_in(schedule)
    return simulated(simulate(program, costs, steps=steps, pairs=pairs)), marks


def steps_to_show(schedule: Schedule) -> int:
    """How many steps to show: one, or, if batches overlap, enough for one in steady state."""
    return schedule.depth + 2 + max(schedule.delays) if schedule.overlaps else 1


def sketch(rows: Sequence[Sequence[T]], cost: Callable[[T], float], waits: Waits) -> Timeline[T]:
    """Return the timeline of ``rows``, in which each item starts as soon as the item before it in
    its row and all items that it waits for are done."""
    spans: list[list[Bar[T]]] = [[] for _ in rows]
    awaited = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for row, own in enumerate(waits):
        for position, source, on in own:
            awaited[row, position].append((source, on))

    def clock(row: int, position: int) -> float:
        before = [*awaited[row, position], *([(row, position - 1)] if position else [])]
        start = max((spans[source][on].end for source, on in before), default=0.0)
        item = rows[row][position]
        spans[row].append(Bar(row, position, start, start + cost(item), item))
        return spans[row][-1].end

    walk(list(map(len, rows)), waits, clock)
    unrun: list[Bar[T]] = []
    for row, items in enumerate(rows):
        free = spans[row][-1].end if spans[row] else 0.0
        for position in range(len(spans[row]), len(items)):
            start, free = free, free + cost(items[position])
            unrun.append(Bar(row, position, start, free, items[position]))
    return Timeline(len(rows), tuple(chain.from_iterable(spans)), tuple(unrun))


def _refused(schedule: Schedule, costs: Costs | None) -> Timeline[Task]:
    """The timeline of one window, as if all tasks of earlier windows had run.

    An update waits for its own stage alone.
    """
    times = times_of(schedule.stages, schedule.kinds, costs)
    each = each_of(costs, schedule.microbatches)

    def cost(task: Task) -> float:
        stage, i = (-1 if n is None else n for n in (task.stage, task.microbatch))
        return each.get((task.kind, stage, i), times.get((task.kind, stage), usual_cost(task.kind)))

    return sketch(schedule.rows, cost, _waits(schedule))


def _waits(schedule: Schedule) -> list[list[Wait]]:
    """What each task waits for; one whose input nothing produces waits for itself, so for ever."""
    # The header may claim any number of micro-batches; at most as many as tasks have one here.
    few = min(schedule.microbatches, sum(map(len, schedule.rows)))
    needs, stages = needs_of(replace(schedule, microbatches=few)), range(schedule.stages)
    places: dict[tuple[str, int | None, int | None, int], Place] = {}
    for device, row in enumerate(schedule.rows):
        for position, task in enumerate(row):
            key = task.kind, key_index(schedule, task, device), task.stage, task.batch
            places.setdefault(key, Place(device, position))

    def awaited(task: Task, here: Place) -> list[Place]:
        stage, batch = task.stage, task.batch
        if stage is None or stage not in stages or task.kind not in KINDS:
            return []
        sources: list[Place] = []
        produced: bool | None = None  # whether another stage produces its input; None: none has to
        for kind, i, there in needs((task.kind, key_index(schedule, task, here.device), stage)):
            on = places.get((kind, i, there, batch))
            if on is not None:
                sources.append(on)
            if there != stage and there in stages:
                produced = produced or on is not None
        if produced is False and batch >= 0 and task.microbatch is not None:
            sources.append(here)
        return sources

    return [
        [(at, *on) for at, task in enumerate(row) for on in awaited(task, Place(device, at))]
        for device, row in enumerate(schedule.rows)
    ]
