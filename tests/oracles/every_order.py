"""The best schedule of a small problem, found by trying every order of every device's tasks.

A step takes as long as the longest path through its tasks. Where steps follow one another, the
time per step is the maximum cycle mean over all cycles of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from math import inf
from typing import Any

Work = tuple[str, int, int]
"""A letter, a micro-batch and a stage."""

Row = tuple[Work, ...]


def best_of_all(problem: Any) -> float:
    """The least time of a problem: of one step, or per step of many."""
    rows = [list(all_rows(problem, device)) for device in range(problem.devices)]
    return min(least_time(problem, chosen) for chosen in product(*rows))


def all_rows(problem: Any, device: int) -> Iterator[Row]:
    """Yield every order of a device's tasks with micro-batches in turn that fits into memory."""
    stages = [s for s, home in enumerate(problem.placement) if home == device]
    kinds = [(k, s) for s in stages for k in ("FI" if problem.whole else "FIW")]

    def more(row: Row, counts: dict[tuple[str, int], int]) -> Iterator[Row]:
        if not has_room(problem, device, row):
            return
        if all(count == problem.microbatches for count in counts.values()):
            yield row
        for (k, s), i in counts.items():
            # skip what the chain of stages forbids anyway
            if k == "F":
                ready = all(counts["F", u] > i for u in stages if u < s)
            elif k == "I":
                ready = all(counts["F", u] > i for u in stages)
                ready = ready and all(counts["I", u] > i for u in stages if u > s)
            else:
                ready = counts["I", s] > i
            if ready and i < problem.microbatches:
                yield from more((*row, (k, i, s)), {**counts, (k, s): i + 1})

    return more((), dict.fromkeys(kinds, 0))


def has_room(problem: Any, device: int, row: Row) -> bool:
    """Whether what the device keeps after the row's last task fits into its memory."""
    kept: dict[tuple[int, int], float] = {}
    for letter, i, s in row:
        kept[i, s] = {"F": problem.saved[s], "I": problem.deferred[s], "W": 0}[letter]
    return bool(sum(kept.values()) <= problem.memory[device])


def least_time(problem: Any, rows: Sequence[Row]) -> float:
    """The makespan of the rows of all devices; infinite if they deadlock."""
    devices = range(len(rows))
    update = [0.0] * len(rows)
    for stage, home in enumerate(problem.placement):
        update[home] += problem.update[stage]
    if problem.flush:
        # all devices meet before their updates
        return max(ends(problem, rows, [0.0] * len(rows))) + max(update)
    # from the first task of one device to the last task of another
    ways = []
    for device in devices:
        reached = ends(problem, rows, [0.0 if d == device else -inf for d in devices])
        ways.append([time + more for time, more in zip(reached, update, strict=True)])
    if any(way == inf for each in ways for way in each):
        return inf
    return max(
        sum(ways[d][e] for d, e in zip(ring, (*ring[1:], ring[0]), strict=True)) / len(ring)
        for size in range(1, len(rows) + 1)
        for ring in permutations(devices, size)
    )


def took(problem: Any, task: Work) -> float:
    """The time of a task."""
    letter, _, s = task
    return float({"F": problem.forward, "I": problem.backward, "W": problem.weight}[letter][s])


def ends(problem: Any, rows: Sequence[Row], begins: Sequence[float]) -> list[float]:
    """Device → the end of its last task, without updates."""
    done: dict[Work, float] = {}
    now, places = list(begins), [0] * len(rows)
    last = len(problem.placement) - 1
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(rows):
            while places[device] < len(row):
                letter, i, s = row[places[device]]
                need: float | None = -inf
                hop = 0.0
                if letter == "F" and s:
                    need, hop = done.get(("F", i, s - 1)), problem.down[s - 1]
                elif letter == "I" and s < last:
                    need, hop = done.get(("I", i, s + 1)), problem.up[s]
                if need is None:
                    break
                now[device] = max(now[device], need + hop) + took(problem, row[places[device]])
                done[letter, i, s] = now[device]
                places[device] += 1
                moved = True
    stuck = any(at < len(row) for at, row in zip(places, rows, strict=True))
    return [inf] * len(rows) if stuck else now
