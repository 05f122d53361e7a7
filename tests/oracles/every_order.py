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


def best_of_all_steps(problem: Any) -> float:
    """The least time per batch if batches mix on devices with one stage each."""
    rows = [list(all_steps(problem, stage)) for stage in range(problem.devices)]
    return min(period(problem, chosen) for chosen in product(*rows))


def all_steps(problem: Any, stage: int) -> Iterator[Row]:
    """Yield every order of a device's tasks that all steps can repeat.

    Forwards are of this step's batch; backwards of earlier batches have negative micro-batches.
    """
    m, delay, kinds = problem.microbatches, problem.delay, "FI" if problem.whole else "FIW"
    sizes = {"F": problem.saved[stage], "I": problem.deferred[stage], "W": 0.0}
    for lags in product(range((delay + 1) * m + 1), repeat=len(kinds) - 1):
        first = dict(zip(kinds, (0, *(-lag for lag in lags)), strict=True))
        for letters in sorted(set(permutations(kinds * m))):
            count, row = dict(first), []
            kept = dict.fromkeys(range(first[kinds[-1]], first["I"]), sizes["I"])
            kept |= dict.fromkeys(range(first["I"], 0), sizes["F"])
            for letter in letters:
                i = count[letter]
                through = count[kinds[-1]] >= -delay * m  # so the weights that it reads exist
                if not (through if letter == "F" else i < count[kinds[kinds.index(letter) - 1]]):
                    break
                count[letter], kept[i] = i + 1, sizes[letter]
                row.append((letter, i, stage))
                if sum(kept.values()) > problem.memory[stage]:
                    break
            else:
                yield tuple(row)


def period(problem: Any, rows: Sequence[Row]) -> float:
    """The time per step in steady state of steps that repeat these rows; infinite if a step waits
    for a later one."""
    took = {"F": problem.forward, "I": problem.backward, "W": problem.weight}
    m, last, steps = problem.microbatches, len(rows) - 1, 44
    ways = {"F": (-1, (0.0, *problem.down)), "I": (1, (*problem.up, 0.0))}
    now, ended = [0.0] * len(rows), []
    done: dict[Work, float] = {}
    for step in range(steps):
        left = [list(row) for row in rows]
        while any(left):
            before = sum(map(len, left))
            for device, row in enumerate(left):
                while row:
                    letter, i, s = row[0]
                    if i + step * m >= 0:
                        other, hops = ways.get(letter, (0, ()))
                        need = 0.0
                        if other and 0 <= s + other <= last:
                            if (letter, i + step * m, s + other) not in done:
                                break
                            need = done[letter, i + step * m, s + other] + hops[s]
                        now[device] = max(now[device], need) + took[letter][s]
                        done[letter, i + step * m, s] = now[device]
                        if letter == ("I" if problem.whole else "W") and i % m == m - 1:
                            now[device] += problem.update[s]
                    row.pop(0)
            if sum(map(len, left)) == before:
                return inf
        ended.append(list(now))
    many = 24  # a multiple of the length of any cycle of up to four devices
    ends = zip(ended[-1], ended[-1 - many], strict=True)
    return max((late - early) / many for late, early in ends)


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


def ends(problem: Any, rows: Sequence[Row], begins: Sequence[float]) -> list[float]:
    """Device → the end of its last task, without updates."""
    took = {"F": problem.forward, "I": problem.backward, "W": problem.weight}
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
                now[device] = max(now[device], need + hop) + took[letter][s]
                done[letter, i, s] = now[device]
                places[device] += 1
                moved = True
    stuck = any(at < len(row) for at, row in zip(places, rows, strict=True))
    return [inf] * len(rows) if stuck else now
