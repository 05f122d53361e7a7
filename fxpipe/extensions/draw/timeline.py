"""Timelines: when tasks run, for pictures and grids."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from fxpipe.errors import InputError
from fxpipe.extensions.draw.chart import FaultMarks, marks_of
from fxpipe.extensions.simulator.chain import chain_program
from fxpipe.extensions.simulator.costs import Costs, each_of, times_of
from fxpipe.extensions.simulator.pairs import pairs_in
from fxpipe.extensions.simulator.simulate import simulate
from fxpipe.extensions.simulator.simulation import Simulation, task_of
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task, usual_cost
from fxpipe.ir.value import Buffer
from fxpipe.ir.walk import Wait, needs_of, walk
from fxpipe.verify.tasks import Window


class Bar(NamedTuple):
    """A task with its start and end.

    ``device`` is its row, a device or one stream of it, and ``position`` its index in the row.
    """

    device: int
    position: int
    start: float
    end: float
    task: Task


@dataclass(frozen=True)
class Timeline:
    """All tasks of some rows, row by row in order.

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
    spans: tuple[Bar, ...]
    unrun: tuple[Bar, ...] = ()
    simulation: Simulation | None = None
    beside: tuple[tuple[int, str], ...] = ()
    joined: frozenset[tuple[int, int]] = frozenset()

    @property
    def steps(self) -> int:
        """How many steps were simulated, with batches numbered from 0; 0 for one window."""
        return 0 if self.simulation is None else self.simulation.steps

    @property
    def bars(self) -> tuple[Bar, ...]:
        """All of them."""
        return (*self.spans, *self.unrun)

    @cached_property
    def stuck(self) -> tuple[Bar, ...]:
        """The task at which each stuck device waits for ever."""
        first: dict[int, Bar] = {}
        for span in self.unrun:
            first.setdefault(span.device, span)
        return tuple(first.values())

    @cached_property
    def end(self) -> float:
        """When the last task ends, including those that never run."""
        return max((span.end for span in self.bars), default=0.0)


def simulated(simulation: Simulation, unit: float = 1.0) -> Timeline:
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
) -> tuple[Timeline, FaultMarks]:
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
    found = simulate(program, costs, steps=steps, pairs=pairs)
    return simulated(replace(found, slices=schedule.slices)), marks


def steps_to_show(schedule: Schedule) -> int:
    """How many steps to show: one, or, if batches overlap, enough for one in steady state."""
    return schedule.depth + 2 + max(schedule.delays) if schedule.overlaps else 1


def _refused(schedule: Schedule, costs: Costs | None) -> Timeline:
    """The timeline of one window, as if all tasks of earlier windows had run: each task starts as
    soon as the one before it and those of its batch that it needs are done. An update waits for its
    own stage alone."""
    times = times_of(schedule.stages, schedule.kinds, costs)
    each = each_of(costs, schedule.microbatches)
    spans: list[list[Bar]] = [[] for _ in schedule.rows]
    waits = _waits(schedule)
    awaited = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for device, own in enumerate(waits):
        for position, there, on in own:
            awaited[device, position].append((there, on))

    def bar(device: int, position: int, start: float) -> Bar:
        task = schedule.rows[device][position]
        stage, i = (-1 if n is None else n for n in (task.stage, task.microbatch))
        time = times.get((task.kind, stage), usual_cost(task.kind))
        return Bar(device, position, start, start + each.get((task.kind, stage, i), time), task)

    def clock(device: int, position: int) -> float:
        before = [spans[there][on].end for there, on in awaited[device, position]]
        before += [bar.end for bar in spans[device][-1:]]
        spans[device].append(bar(device, position, max(before, default=0.0)))
        return spans[device][-1].end

    walk(list(map(len, schedule.rows)), waits, clock)
    unrun: list[Bar] = []
    for device, row in enumerate(schedule.rows):
        free = spans[device][-1].end if spans[device] else 0.0
        for position in range(len(spans[device]), len(row)):
            unrun.append(bar(device, position, free))
            free = unrun[-1].end
    return Timeline(schedule.devices, tuple(chain.from_iterable(spans)), tuple(unrun))


def _waits(schedule: Schedule) -> list[list[Wait]]:
    """What each well-formed task waits for: those of its batch that it needs, if they are there."""
    # The header may claim any number of micro-batches; at most as many as tasks have one here.
    few = min(schedule.microbatches, sum(map(len, schedule.rows)))
    schedule = replace(schedule, microbatches=few)
    needs, spots = needs_of(schedule), Window(schedule).spots
    waits: list[list[Wait]] = [[] for _ in schedule.rows]
    for key, at in spots.items():
        needed = [spots[other] for other in needs(key) if other in spots]
        waits[at.device] += [
            (at.position, on.device, on.position) for on in needed if on.batch == at.batch
        ]
    return waits
