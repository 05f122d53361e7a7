"""Schedule → Schedule: stages store what they keep off their devices until their backwards need it.

before:  0: F0 F1 F2 F3 B0 B1 B2 B3 U
after:   0: F0 O0 F1 O1 F2 O2 P0 F3 O3 P1 B0 P2 B1 P3 B2 B3 U
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from fxpipe.arguments import read_modes
from fxpipe.compiler.options import Options
from fxpipe.extend import Extension
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task
from fxpipe.ir.walk import Wait, needs_of, walk
from fxpipe.passes.runner import Pass
from fxpipe.passes.schedule import RecomputeLike, modes_of


def add_offload(schedule: Schedule, offload: RecomputeLike) -> Schedule:
    """Schedule → Schedule: an offload right after forwards, a prefetch before their backwards.

    A prefetch begins as late as it can without delaying the backward, or the recompute, by the
    costs of the kinds of tasks. A micro-batch stays on the device if fewer than three tasks run
    between its forward and that: one must overlap the store and one the fetch.

    Args:
        schedule: a valid schedule without offloads; any other is returned unchanged.
        offload: which stages offload what they keep. "except_last" leaves out the last micro-batch.
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
    rows = (tuple(_offloading(schedule, d, stored, spans)) for d in range(schedule.devices))
    return replace(schedule, rows=tuple(rows))


def _spans(schedule: Schedule) -> dict[Task, tuple[float, float]]:
    """Task of a micro-batch → its start and end, over several steps; the first step is batch 0."""
    steps = 3 * schedule.depth + 2
    rows = [
        [
            replace(task, batch=step + task.batch)
            for step in range(steps + schedule.depth)
            for task in row
            if task.microbatch is not None and 0 <= step + task.batch < steps
        ]
        for row in schedule.rows
    ]
    places = {task: (device, at) for device, row in enumerate(rows) for at, task in enumerate(row)}
    needs, spans, free = needs_of(schedule), dict[Task, tuple[float, float]](), [0.0] * len(rows)
    needed = {
        task: [
            before
            for key in needs((task.kind, task.microbatch, task.stage or 0))
            if (before := Task(*key, task.batch)) in places
        ]
        for task in places
    }
    waits: list[list[Wait]] = [
        [(at, *places[before]) for at, task in enumerate(row) for before in needed[task]]
        for row in rows
    ]

    def clock(device: int, at: int) -> float:
        task = rows[device][at]
        start = max(free[device], *(spans[before][1] for before in needed[task]), 0.0)
        free[device] = start + KINDS[task.kind].cost
        spans[task] = start, free[device]
        return free[device]

    walk([len(row) for row in rows], waits, clock)
    return spans


def _offloading(
    schedule: Schedule,
    device: int,
    stored: Collection[tuple[int | None, int | None]],
    spans: Mapping[Task, tuple[float, float]],
) -> Iterator[Task]:
    """Yield a device's tasks with their offloads and prefetches.

    It looks at several windows in a row, so that a forward and its backward are in one list. They
    lie in the middle of the steps that ``spans`` covers.
    """
    row, depth = schedule.rows[device], schedule.depth
    tasks = [
        replace(task, batch=bool(depth) * (depth + 1) + window + task.batch)
        for window in range(2 * depth + 1)
        for task in row
    ]
    free = [0.0]  # when the device is free for each task
    for task in tasks:
        runs = task.microbatch is not None or depth
        free.append(max(free[-1], spans.get(task, (0.0, 0.0))[1] if runs else 0.0))
    forwards = {replace(t, kind="B"): at for at, t in enumerate(tasks) if t.kind == "F"}
    recomputed = {(t.stage, t.microbatch) for t in row if t.kind == "R"}
    offloads: set[int] = set()
    prefetches: defaultdict[int, list[Task]] = defaultdict(list)
    latest = inf
    for at in reversed(range(len(tasks))):
        task = tasks[at]
        first, key = forwards.get(replace(task, kind="B"), at), (task.stage, task.microbatch)
        between = [k for k in range(first + 1, at) if tasks[k].microbatch is not None]
        needs = "R" if key in recomputed else "BI"
        if task.kind not in needs or len(between) < 3 or key not in stored:
            continue
        latest = min(latest, spans.get(task, (0.0, 0.0))[0]) - KINDS["P"].cost
        place = max(bisect_right(free, latest, hi=at + 1) - 1, between[1] + 1)
        if first < len(row):
            window, position = divmod(place, len(row))
            batch = row[first].batch - window
            prefetches[position].insert(0, replace(task, kind="P", batch=batch))
            offloads.add(first)
    position = 0
    for unit in schedule.units(device):
        for at in range(position, position + len(unit)):
            yield from prefetches[at]
        yield from unit
        if position in offloads:  # the forward of a pair comes first
            yield replace(unit[0], kind="O")
        position += len(unit)


@dataclass(frozen=True)
class Offload(Extension):
    """Let stages store what they keep for their backwards (their inputs, if they recompute) outside
    of their devices' memory, and fetch it in time; both happen beside their computations.

    CUDA devices store in pinned host memory, and CPU devices in an unnamed file in the folder of
    Python's ``tempfile`` (TMPDIR).

    Attributes:
        modes: which stages do, as for ``recompute`` of ``compile``: "never", "always", or
            "except_last" (all micro-batches but the last), a list of modes, or stage → mode.
    """

    modes: RecomputeLike = "always"

    def check(self, options: Options) -> None:
        """Raise InputError if there is no such mode or stage."""
        read_modes("Offload", self.modes, options.recipe.stages(len(options.devices)))

    def passes(self, options: Options) -> Mapping[str, Sequence[tuple[str, Pass]]]:
        """A pass behind all others that add tasks to a schedule."""
        return {"schedule": [("add_clip", Pass(self.add_offload, "schedule", "schedule"))]}

    def add_offload(self, schedule: Schedule) -> Schedule:
        """Add offloads and prefetches; a pass."""
        return add_offload(schedule, self.modes)
