"""Schedule → Schedule: what a pipe's options add.

``add_recompute`` keeps a stage's inputs, and runs its forward again before its backward.

before:  1: F0 F1 B0 F2 B1 B2 U
after:   1: F0 F1 R0 B0 F2 R1 B1 B2 U          except_last: the last micro-batch is kept

``add_reduce`` sums a stage's gradients over replicas and copies, beside whatever follows.

before:  0: F0 F1 I0 W0 I1 W1 U            1: F0 I0 F1 I1 W0 W1 U
after:   0: F0 F1 I0 W0 I1 W1 A U          1: F0 I0 F1 I1 W0 W1 A U

``add_clip`` lets every stage wait for the norms of all before it updates.

before:  0: F0 B2' F1 B3' U' F2 B0 F3 B1         2: F0 B0 F1 B1 F2 B2 F3 B3 U
after:   0: F0 B2' F1 B3' F2 B0 F3 B1 C' U'      2: F0 B0 F1 B1 F2 B2 F3 B3 C' U'

``add_offload`` stores what a stage keeps elsewhere, and fetches it before its backward.

before:  0: F0 F1 F2 F3 B0 B1 B2 B3 U
after:   0: F0 O0 F1 O1 F2 O2 P0 F3 O3 P1 B0 P2 B1 P3 B2 B3 U
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Literal

from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import BUILT_IN, KINDS, Task
from fxpipe.ir.unroll import unroll_schedule
from fxpipe.ir.walk import Wait, needs_of, walk


def write_schedule(recipe: Recipe, devices: int, microbatches: int, short: bool) -> Schedule:
    """A recipe's schedule. Where it is too short to overlap with its delay it ends with a flush.

    Only a schedule for fewer micro-batches than a whole batch has can be too ``short``.

    Raises:
        VerificationError: it is wrong.
    """
    schedule = recipe(devices, microbatches)
    if short and schedule.overlaps and not schedule.versions().enough:
        schedule = end_with_flush(schedule)
    return schedule.verify()


def end_with_flush(schedule: Schedule) -> Schedule:
    """The same tasks in the order in which one batch alone meets them, its flush included.

    Before, with a delay of 1, which two micro-batches on four devices are too few for::

        0: F0 B1'' U'' F1 B0'

    after, where any delay is enough::

        0: F0 F1 B0 B1 U
    """
    rows = tuple(
        tuple(replace(task, batch=0) for task in sorted(row, key=lambda task: -task.batch))
        for row in schedule.rows
    )
    return replace(schedule, rows=rows)


Recompute = Literal["never", "always", "except_last"]
RecomputeLike = Recompute | Sequence[Recompute] | Mapping[int, Recompute]
"""The mode of all stages, of each in order, or by its number; who is left out never recomputes."""


def add_recompute(schedule: Schedule, recompute: RecomputeLike) -> Schedule:
    """Schedule → Schedule: a recompute right before each backward that is to have one.

    Args:
        schedule: one without recomputes of its own; those that it has are left alone.
        recompute: which stages run their forwards again. With "except_last" that of the last
            micro-batch does not: on the last stage its backward follows at once.
    """
    if "R" in schedule.kinds or not schedule.trains:
        return schedule
    modes = modes_of(recompute, schedule.stages)
    rows = (tuple(_row(row, schedule.microbatches, modes)) for row in schedule.rows)
    return replace(schedule, rows=tuple(rows))


def modes_of(given: RecomputeLike, stages: int) -> tuple[Recompute, ...]:
    """Stage → whether it recomputes."""
    if isinstance(given, str):
        return (given,) * stages
    if isinstance(given, Mapping):
        return tuple(given.get(stage, "never") for stage in range(stages))
    return tuple(given)


def _row(row: tuple[Task, ...], microbatches: int, modes: Sequence[Recompute]) -> Iterator[Task]:
    for task in row:
        if task.kind in "BI" and task.stage is not None:
            mode = modes[task.stage]
            kept = mode == "except_last" and task.microbatch == microbatches - 1
            if mode != "never" and not kept:
                yield replace(task, kind="R")
        yield task


def add_reduce(schedule: Schedule, shards: bool = False) -> Schedule:
    """Schedule → Schedule: a reduce right after each stage's last backward.

    Where batches overlap, an update that stands right behind would wait for all of the sum. It
    then comes as late as the delay allows, right before the first forward that reads its version,
    so that the sum hides behind the tasks between, in 1F1B without flush behind m − p + 1 micro-
    batches of m. Until then a stage keeps the gradients of two batches. With tasks of one's own,
    and clips, updates stay where they are. Where optimizers are sharded the new weights have to be
    gathered before that forward, so that an update comes halfway.

    Before, with a delay of 1 on two devices::

        0: F0 B1' U' F1 B0
        1: F0 B0 F1 B1 U

    after::

        0: U'' F0 B1' A' F1 B0
        1: U'' F0 B0 F1 B1 A

    Args:
        schedule: one that reduces nowhere; others are left alone.
        shards: whether each replica updates a part of the weights.
    """
    if "A" in schedule.kinds:
        return schedule
    rows = (tuple(_reducing(row)) for row in schedule.rows)
    reducing = replace(schedule, rows=tuple(rows))
    if not schedule.depth or "C" in schedule.kinds or schedule.kinds - BUILT_IN:
        return reducing
    rows = (tuple(_late(schedule, row, shards)) for row in reducing.rows)
    return replace(schedule, rows=tuple(rows))


def _reducing(row: tuple[Task, ...]) -> Iterator[Task]:
    """A device's tasks, with a reduce behind its last backward of each stage; where all of them are
    on copies of the stage, before its update."""
    ends = [task for task in row if task.kind in "BW" and task.microbatch is not None]
    last = {task.stage: task for task in sorted(ends, key=lambda task: task.microbatch or 0)}
    for task in row:
        if task.kind == "U" and task.stage not in last:
            yield replace(task, kind="A")
        yield task
        if last.get(task.stage) == task:
            yield replace(task, kind="A", microbatch=None)


def _late(schedule: Schedule, row: tuple[Task, ...], shards: bool) -> list[Task]:
    """A device's tasks with each update right before the first forward that reads its version, or
    halfway there, where it then has more tasks between itself and its reduce."""
    tasks = list(row)
    for update in [task for task in row if task.kind == "U"]:
        stage = update.stage
        assert stage is not None
        rest = [task for task in tasks if task != update]
        steps, at = min(
            (schedule.delay_of(stage, task.microbatch) - task.batch, at)
            for at, task in enumerate(rest)
            if (task.kind, task.stage) == ("F", stage)
        )
        moved = [*rest[:at], replace(update, batch=-1 - steps), *rest[at:]]
        if shards:
            earlier, at = divmod(at - _between(moved, stage) // 2, len(rest))
            moved = [*rest[:at], replace(update, batch=-1 - steps - earlier), *rest[at:]]
        if _between(moved, stage) > _between(tasks, stage):
            tasks = moved
    return tasks


def _between(tasks: Sequence[Task], stage: int) -> int:
    """How many tasks a device runs between the reduce of a stage's gradients and its update."""
    at = {task.kind: (-task.batch, k) for k, task in enumerate(tasks) if task.stage == stage}
    (step, reduce), (later, update) = at["A"], at["U"]
    return (later - step) * len(tasks) + update - reduce - 1


def add_clip(schedule: Schedule) -> Schedule:
    """Schedule → Schedule: a clip before every update.

    With a flush a device clips once it has all its gradients, and updates after that. Where
    batches overlap a stage that is through early would wait for the others: all stages clip and
    update at the end of the step in which the last of them has its gradients, so that nobody
    waits; until then the early ones keep the gradients of two batches.
    """
    if "C" in schedule.kinds or "U" not in schedule.kinds:
        return schedule
    if not schedule.overlaps:
        return replace(schedule, rows=tuple(map(_clipped, schedule.rows)))
    batch = min(task.batch for row in schedule.rows for task in row if task.kind != "U")
    late: list[tuple[Task, ...]] = []
    for device, row in enumerate(schedule.rows):
        own = [task for task in row if task.kind != "U"]
        for stage in schedule.held_by(device):
            own += [Task("C", None, stage, batch), Task("U", None, stage, batch)]
        late.append(tuple(own))
    return replace(schedule, rows=tuple(late))


def _clipped(row: tuple[Task, ...]) -> tuple[Task, ...]:
    """A device's tasks with a flush: its updates come after all of its gradients."""
    complete = 1 + max((at for at, task in enumerate(row) if task.kind in "BWA"), default=-1)
    before = [task for task in row[:complete] if task.kind != "U"]
    early = [task for task in row[:complete] if task.kind == "U"]
    clips = [replace(task, kind="C") for task in row if task.kind == "U"]
    return (*before, *clips, *early, *row[complete:])


def add_offload(schedule: Schedule, offload: RecomputeLike) -> Schedule:
    """Schedule → Schedule: an offload right after forwards, a prefetch before their backwards.

    A prefetch begins as late as it can so that its backward, or the recompute of its micro-batch,
    need not wait for it, by the costs of the kinds of tasks. Where fewer than three tasks of the
    device come between a forward and that nothing is offloaded: one runs while it is stored and one
    while it is fetched.

    Args:
        schedule: a valid one that offloads nowhere; others are left alone.
        offload: which stages store what they keep. With "except_last" that of the last micro-batch
            is kept.
    """
    if "O" in schedule.kinds or not schedule.trains:
        return schedule
    modes = modes_of(offload, schedule.stages)
    stored = {
        (stage, i)
        for stage, mode in enumerate(modes)
        for i in range(schedule.microbatches - (mode == "except_last"))
        if mode != "never"
    }
    spans = _spans(schedule)
    rows = (tuple(_offloading(row, schedule.depth, stored, spans)) for row in schedule.rows)
    return replace(schedule, rows=tuple(rows))


def _spans(schedule: Schedule) -> dict[Task, tuple[float, float]]:
    """Start and end of tasks of micro-batches in some steps; batches count from the first."""
    rows = unroll_schedule(schedule, 3 * schedule.depth + 2).rows
    rows = tuple(tuple(task for task in row if task.microbatch is not None) for row in rows)
    places = {task: (device, at) for device, row in enumerate(rows) for at, task in enumerate(row)}
    needs, spans, free = needs_of(schedule), dict[Task, tuple[float, float]](), [0.0] * len(rows)
    needed = [
        [
            [
                before
                for key in needs((task.kind, task.microbatch, task.stage or 0))
                if (before := Task(*key, task.batch)) in places
            ]
            for task in row
        ]
        for row in rows
    ]
    waits: list[list[Wait]] = [
        [(at, *places[before]) for at, own in enumerate(each) for before in own] for each in needed
    ]

    def clock(device: int, at: int) -> float:
        task = rows[device][at]
        start = max(free[device], *(spans[before][1] for before in needed[device][at]), 0.0)
        free[device] = start + KINDS[task.kind].cost
        spans[task] = start, free[device]
        return free[device]

    walk([len(row) for row in rows], waits, clock)
    return spans


def _offloading(
    row: tuple[Task, ...],
    depth: int,
    stored: Collection[tuple[int | None, int | None]],
    spans: Mapping[Task, tuple[float, float]],
) -> Iterator[Task]:
    """A device's tasks, with what they store and fetch.

    Several windows stand one after another, so that a forward and its backward are in one list.
    ``spans`` counts batches from the first of its steps, so these are in the midst of them.
    """
    tasks = [
        replace(task, batch=bool(depth) * (depth + 1) + window + task.batch)
        for window in range(2 * depth + 1)
        for task in row
    ]
    free = [0.0]  # when a device comes to each task
    for task in tasks:
        runs = task.microbatch is not None or depth
        free.append(max(free[-1], spans.get(task, (0.0, 0.0))[1] if runs else 0.0))
    forwards = {replace(t, kind="B"): at for at, t in enumerate(tasks) if t.kind == "F"}
    again = {(t.stage, t.microbatch) for t in row if t.kind == "R"}
    offloads: set[int] = set()
    prefetches: defaultdict[int, list[Task]] = defaultdict(list)
    latest = inf
    for at in reversed(range(len(tasks))):
        task = tasks[at]
        first, key = forwards.get(replace(task, kind="B"), at), (task.stage, task.microbatch)
        between = [k for k in range(first + 1, at) if tasks[k].microbatch is not None]
        needs = "R" if key in again else "BI"
        if task.kind not in needs or len(between) < 3 or key not in stored:
            continue
        latest = min(latest, spans.get(task, (0.0, 0.0))[0]) - KINDS["P"].cost
        place = max(bisect_right(free, latest, hi=at + 1) - 1, between[1] + 1)
        if first < len(row):
            window, position = divmod(place, len(row))
            batch = row[first].batch - window
            prefetches[position].insert(0, replace(task, kind="P", batch=batch))
            offloads.add(first)
    for position, task in enumerate(row):
        yield from prefetches[position]
        yield task
        if position in offloads:
            yield replace(task, kind="O")
