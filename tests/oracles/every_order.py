"""The best of all orders: every way to order the tasks of each device, tried in turn.

It has its own arithmetic: tasks by name, the longest way to each, and, where steps follow one
another, the greatest mean over every round of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations, product
from math import inf
from typing import Any

Work = tuple[str, int]
Row = tuple[Work, ...]


def best_of_all(problem: Any) -> float:
    """The least time of a problem with a stage a device: of a step, or of each of many."""
    rows = [
        [row for row in all_rows(problem.microbatches, problem.whole) if has_room(problem, s, row)]
        for s in range(problem.stages)
    ]
    return min(least_time(problem, chosen) for chosen in product(*rows))


@cache
def all_rows(microbatches: int, whole: bool) -> tuple[Row, ...]:
    """Every order of a device's tasks in which micro-batches come in turn."""
    letters = "FI" if whole else "FIW"

    def more(row: Row, counts: tuple[int, ...]) -> Iterator[Row]:
        if all(count == microbatches for count in counts):
            yield row
        for k, letter in enumerate(letters):
            before = microbatches if k == 0 else counts[k - 1]
            if counts[k] < before:
                grown = (*counts[:k], counts[k] + 1, *counts[k + 1 :])
                yield from more((*row, (letter, counts[k])), grown)

    return tuple(more((), (0,) * len(letters)))


def has_room(problem: Any, stage: int, row: Row) -> bool:
    kept: dict[int, float] = {}
    for letter, i in row:
        kept[i] = {"F": problem.saved[stage], "I": problem.deferred[stage], "W": 0}[letter]
        if sum(kept.values()) > problem.memory[stage]:
            return False
    return True


def least_time(problem: Any, rows: Sequence[Row]) -> float:
    """Of the rows of all devices; infinite where they wait for one another."""
    devices = range(len(rows))
    if problem.flush:
        # all devices meet before their updates
        return max(ends(problem, rows, [0.0] * len(rows))) + float(max(problem.update))
    # from the first task of one device to the last of another
    ways = [
        [
            time + float(update)
            for time, update in zip(
                ends(problem, rows, [0.0 if d == e else -inf for d in devices]),
                problem.update,
                strict=True,
            )
        ]
        for e in devices
    ]
    if any(way == inf for each in ways for way in each):
        return inf
    return max(
        sum(ways[d][e] for d, e in zip(ring, (*ring[1:], ring[0]), strict=True)) / len(ring)
        for size in range(1, len(rows) + 1)
        for ring in permutations(devices, size)
    )


def ends(problem: Any, rows: Sequence[Row], begins: Sequence[float]) -> list[float]:
    """Device → its end, updates left out."""
    took = {"F": problem.forward, "I": problem.backward, "W": problem.weight}
    done: dict[tuple[str, int, int], float] = {}
    now, left = list(begins), [list(row) for row in rows]
    last = problem.stages - 1
    while any(left):
        moved = False
        for s, row in enumerate(left):
            while row:
                letter, i = row[0]
                if letter == "F":
                    need = done.get(("F", i, s - 1)) if s else -inf
                    hop = problem.down[s - 1] if s else 0
                elif letter == "I":
                    need = done.get(("I", i, s + 1)) if s < last else -inf
                    hop = problem.up[s] if s < last else 0
                else:
                    need, hop = -inf, 0
                if need is None:
                    break
                now[s] = max(now[s], need + hop) + took[letter][s]
                done[letter, i, s] = now[s]
                row.pop(0)
                moved = True
        if not moved:
            return [inf] * len(rows)
    return now
