"""A simulator of a few lines that finds when a schedule's tasks run.

Communication is free, and stages are equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task

AS_LONG = {"F": 1, "B": 1, "I": 1, "W": 1, "A": 0, "U": 0}
"""Times of tasks, with a backward as long as a forward, as many papers draw it."""

HALVES = {"F": 1, "B": 2, "I": 1, "W": 1, "A": 0, "U": 0}
"""Times of tasks, with equal forwards, input gradients and weight gradients."""


def times(forward: int, input_gradient: int, weight_gradient: int) -> dict[str, int]:
    whole = input_gradient + weight_gradient
    return {"F": forward, "B": whole, "I": input_gradient, "W": weight_gradient, "A": 0, "U": 0}


class Ran(NamedTuple):
    """A task with its start and end."""

    task: Task
    start: int
    end: int


Timeline = list[list[Ran]]
"""Device → its tasks in order."""


def run_of(schedule: Schedule, steps: int) -> Schedule:
    """Unroll windows and the flush into one long step; micro-batch i of batch t is t m + i."""
    m = schedule.microbatches
    rows = []
    for row in schedule.rows:
        whole = []
        for window in range(steps + schedule.depth):
            for task in row:
                batch = window + task.batch
                if 0 <= batch < steps:
                    i = None if task.microbatch is None else batch * m + task.microbatch
                    whole.append(Task(task.kind, i, task.stage))
        rows.append(tuple(whole))
    return replace(schedule, microbatches=m * steps, rows=tuple(rows))


def simulate(schedule: Schedule, takes: Mapping[str, int], *, together: bool = False) -> Timeline:
    """Start each task as soon as its device is free and its inputs exist.

    A pair is one pass, which starts when the inputs of both exist and ends both at once, perhaps in
    a time of its own, such as that of "F&B". With ``together``, every forward and the whole
    backward after it are one.
    """
    rows = [_passes(row, together, schedule.paired) for row in schedule.rows]
    ends: dict[tuple[str, int | None, int], int] = {}
    free = [0] * schedule.devices
    timeline: Timeline = [[] for _ in rows]
    while any(rows):
        waiting = sum(map(len, rows))
        for device, row in enumerate(rows):
            while row:
                needs = [need for task in row[0] for need in _needs(schedule, task)]
                if not all(need in ends for need in needs):
                    break
                tasks = row.pop(0)
                start = max([free[device], *(ends[need] for need in needs)])
                whole = takes.get("&".join(task.kind for task in tasks))
                for number, task in enumerate(tasks):
                    end = start + takes[task.kind]
                    if number and whole is not None:
                        end = start + whole - takes["F"]
                    timeline[device].append(Ran(task, start, end))
                    start = end
                for task in tasks:
                    assert task.stage is not None
                    ends[task.kind.replace("B", "I"), task.microbatch, task.stage] = end
                free[device] = end
        assert sum(map(len, rows)) < waiting, "deadlock"
    return timeline


def _passes(
    row: tuple[Task, ...], together: bool, paired: Collection[Task]
) -> list[tuple[Task, ...]]:
    passes: list[tuple[Task, ...]] = []
    for task in row:
        forward = bool(passes) and [t.kind for t in passes[-1]] == ["F"]
        if task in paired or (together and forward and task.kind == "B"):
            passes[-1] = (*passes[-1], task)
        else:
            passes.append((task,))
    return passes


def _needs(schedule: Schedule, task: Task) -> list[tuple[str, int | None, int]]:
    i, s = task.microbatch, task.stage
    assert s is not None
    match task.kind:
        case "F":
            return [("F", i, s - 1)] if s else []
        case "B" | "I":
            return [("F", i, s), *([("I", i, s + 1)] if s < schedule.stages - 1 else [])]
        case "W":
            return [("I", i, s)]
        case "A" | "U":
            return []
    raise AssertionError(task)


def makespan(timeline: Timeline) -> int:
    return max(ran.end for own in timeline for ran in own)


def busy(timeline: Timeline, device: int) -> int:
    return sum(ran.end - ran.start for ran in timeline[device])


def idle(timeline: Timeline) -> int:
    """The longest idle time of a device between its first task and its last."""
    return max(
        own[-1].end - own[0].start - busy(timeline, device) for device, own in enumerate(timeline)
    )


def grid(schedule: Schedule, takes: Mapping[str, int]) -> str:
    """Draw a row per device and a column per unit of time, second stages in lower case."""
    timeline = simulate(schedule, takes)
    rows = []
    for device, own in enumerate(timeline):
        cells = ["."] * makespan(timeline)
        held = schedule.held_by(device)
        first = next(stage for stage in held if schedule.placement[stage] == device)
        for ran in own:
            if ran.end > ran.start:
                letter = ran.task.kind if ran.task.stage == first else ran.task.kind.lower()
                cells[ran.start : ran.end] = [f"{letter}{ran.task.microbatch}"] + ["-"] * (
                    ran.end - ran.start - 1
                )
        rows.append(" ".join(f"{cell:>2}" for cell in cells))
    return "\n".join(rows)


def drawn_in(recipe: Recipe) -> str:
    """The grid in the recipe's docstring, without its updates."""
    lines = [line.strip() for line in (recipe.tasks.__doc__ or "").splitlines()]
    rows = [line.partition(": ")[2] for line in lines if line[:1].isdigit() and line[1:3] == ": "]
    return "\n".join(row.removesuffix(" U") for row in rows)


_KEPT = {"F": 1, "B": -1, "I": 0, "W": -1, "A": 0, "U": 0}


def peak_stash(schedule: Schedule, *stages: int, device: int | None = None) -> int:
    """The most micro-batches that these stages of a device keep at once."""
    kept = peak = 0
    for task in schedule.rows[schedule.placement[stages[0]] if device is None else device]:
        if task.stage in stages:
            kept += _KEPT[task.kind]
            peak = max(peak, kept)
    return peak


def device_kept(schedule: Schedule, device: int) -> int:
    """The most micro-batches that all stages of a device keep at once, counted by stage."""
    return peak_stash(schedule, *schedule.held_by(device), device=device)
