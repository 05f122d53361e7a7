"""When the tasks of a schedule run, if each takes its time and communication takes none."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from fxpipe.draw.walk import NOWHERE, Place, Walked, walk_rows
from fxpipe.errors import InputError, near
from fxpipe.schedule import KINDS, Schedule, Task

TIMES: dict[str, float] = {"F": 1.0, "B": 2.0, "U": 0.5}
"""Letter of a task's kind → the time that it takes where nothing is known of it."""

_UNKNOWN_TIME = 1.0


class Timeline(Walked[Task]):
    """A schedule that has been walked."""

    @cached_property
    def makespan(self) -> float:
        """When the last task ends."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def bubble(self) -> float:
        """Share of the devices' time that is idle, until the last micro-batch is through.

        The updates that come after it do not count, as in the papers' (p − 1) / (m + p − 1).
        """
        through = max((s.end for s in self.spans if s.task.microbatch is not None), default=0.0)
        if through == 0:
            return 0.0
        busy = sum(max(min(s.end, through) - s.start, 0.0) for s in self.spans)
        return 1 - busy / (self.devices * through)


def task_times(costs: Mapping[str, float] | None = None) -> dict[str, float]:
    """Letter → time, for every kind: ``costs``, and TIMES where it leaves one out.

    Raises:
        InputError: a letter is unknown or a time is negative.
    """
    for letter, time in (costs or {}).items():
        if letter not in KINDS:
            raise InputError(f"costs has no kind of task {letter!r}: {near(letter, KINDS)}")
        if not 0 <= time < float("inf"):
            raise InputError(f"costs[{letter!r}] is {time}; a task takes a time of at least 0")
    return {**dict.fromkeys(KINDS, _UNKNOWN_TIME), **TIMES, **(costs or {})}


def walk(schedule: Schedule, costs: Mapping[str, float] | None = None) -> Timeline:
    """Run a schedule on paper, valid or not.

    A forward waits for the forward of the stage before, a backward for the backward of the stage
    after, every task for those of its own stage that it follows, and an update for the last
    micro-batch of its stage, or with ``delay=0`` of every device. Within an earlier batch, what
    the schedule does not hold has run already.
    """
    times = task_times(costs)
    walked = walk_rows(
        schedule.rows, lambda task: times.get(task.kind, _UNKNOWN_TIME), _needs(schedule)
    )
    return Timeline(walked.devices, walked.spans, walked.stuck, walked.unrun)


def _needs(schedule: Schedule) -> list[list[list[Place]]]:
    """Device → for each of its tasks, the places of the tasks that it waits for."""
    places: dict[Task, Place] = {}
    # Stage (None for any) and batch → device → its last micro-batch's place.
    last: dict[tuple[int | None, int], dict[int, Place]] = {}
    for device, row in enumerate(schedule.rows):
        for position, task in enumerate(row):
            places.setdefault(task, (device, position))
            if task.microbatch is not None:
                for stage in (task.stage, None):
                    last.setdefault((stage, task.batch), {})[device] = (device, position)

    def needs(task: Task) -> list[Place]:
        if task.microbatch is None:
            stage = None if schedule.delay == 0 else task.stage
            return list(last.get((stage, task.batch), {}).values())
        kind = KINDS.get(task.kind)
        before = [
            Task(letter, task.microbatch, task.stage, task.batch)
            for letter in (kind.follows if kind else "")
        ]
        waits = [places[other] for other in before if other in places]
        beyond = _across(schedule, task)
        if beyond is not None:
            absent = [] if task.batch < 0 else [NOWHERE]
            waits += [places[beyond]] if beyond in places else absent
        return waits

    return [[needs(task) for task in row] for row in schedule.rows]


def _across(schedule: Schedule, task: Task) -> Task | None:
    """The task of the neighbouring stage whose result comes in, if there is one."""
    step = {"F": -1, "B": 1}.get(task.kind)
    if step is None or task.stage is None:
        return None
    stage = task.stage + step
    inside = 0 <= stage < schedule.stages
    return Task(task.kind, task.microbatch, stage, task.batch) if inside else None
