"""Search the downsets of a graph, where they are few enough: exact on small and narrow graphs.

The first k stages together hold a downset, so a partition is a chain of them. Between one value
that all goes through and the next there are few, and they add up, not multiply: a model of many
branches that meet has as many downsets as its branches have each, summed.
"""

from __future__ import annotations

import math
from functools import cache

from fxpipe.passes.partition.work import Machine, Transfer, Work, weigh

_STATES = 20_000
_EXPANSIONS = 20_000


class TooManyError(Exception):
    """There are more downsets than can be looked at."""


def pack(work: Work, machine: Machine, limit: float, light: float) -> list[int] | None:
    """Stages of at most ``limit`` seconds of compute each, by dynamic programming over downsets.

    Of two ways to the same downset the one that is in an earlier stage, or as far and with less in
    it, can do all that the other can; so one state a downset is enough. The lightest atoms,
    ``light`` seconds in all, are taken as weightless: they go wherever they can first, and do not
    multiply the downsets.

    Returns atom → stage, or None where there is no such assignment.

    Raises:
        TooManyError: there are too many downsets to tell.
    """
    seconds = _without_light(work, light)
    total = math.fsum(seconds)
    ahead = _suffix_sums(machine.speeds)
    before = [sum(1 << source for source in sources) for sources in work.before]
    states = _STATES + 2 * len(work)
    # downset → (stage, seconds in it, what is ready, the downset it came from, what it took)
    start = _closed(0, [a for a, sources in enumerate(work.before) if not sources], work, seconds)
    level: dict[int, tuple[int, float, tuple[int, ...]]] = {start[0]: (0, 0.0, start[1])}
    origin: dict[int, tuple[int, int]] = {start[0]: (0, 0)}
    done = {start[0]: 0.0}
    everything = (1 << len(work)) - 1
    while level and everything not in level:
        following: dict[int, tuple[int, float, tuple[int, ...]]] = {}
        for downset, (stage, load, ready) in level.items():
            for atom in ready:
                weight = seconds[atom]
                k, filled = stage, load + weight
                while k < machine.stages and filled > limit * machine.speeds[k]:
                    k, filled = k + 1, weight
                if k == machine.stages:
                    continue
                taken = done[downset] + weight
                room = limit * ahead[k] - filled
                if room < (total - taken) * (1 - 1e-12):
                    continue
                key = downset | 1 << atom
                others = [other for other in ready if other != atom]
                others += [r for r in work.after[atom] if before[r] & ~key == 0]
                key, free = _closed(key, others, work, seconds)
                known = following.get(key)
                if known is None or (k, filled) < known[:2]:
                    following[key] = (k, filled, free)
                    origin[key] = (downset, k)
                    done[key] = taken
            if len(done) > states:
                raise TooManyError
        level = following
    if not level:
        return None
    return _traced_back(everything, origin, len(work))


def _without_light(work: Work, light: float) -> list[float]:
    """The seconds, with the lightest atoms taken as weightless while they sum to ``light``."""
    seconds = list(work.seconds)
    left = light
    for atom in sorted(range(len(work)), key=seconds.__getitem__):
        if seconds[atom] > left:
            break
        left -= seconds[atom]
        seconds[atom] = 0.0
    return seconds


def _closed(
    downset: int, ready: list[int], work: Work, seconds: list[float]
) -> tuple[int, tuple[int, ...]]:
    """Take in what is ready and weighs nothing: the downset, and what is ready then."""
    heavy: set[int] = set()
    waiting = list(ready)
    while waiting:
        atom = waiting.pop()
        if seconds[atom]:
            heavy.add(atom)
            continue
        downset |= 1 << atom
        for reader in work.after[atom]:
            if all(downset >> source & 1 for source in work.before[reader]):
                waiting.append(reader)
    return downset, tuple(sorted(heavy))


def _traced_back(downset: int, origin: dict[int, tuple[int, int]], atoms: int) -> list[int]:
    stage_of = [0] * atoms
    while downset:
        earlier, stage = origin[downset]
        added = downset & ~earlier
        while added:
            bit = added & -added
            stage_of[bit.bit_length() - 1] = stage
            added ^= bit
        if earlier == downset:
            break
        downset = earlier
    return stage_of


def _suffix_sums(speeds: tuple[float, ...]) -> list[float]:
    return [math.fsum(speeds[stage:]) for stage in range(len(speeds) + 1)]


def downsets(work: Work, most: int) -> list[int] | None:
    """All downsets as bit sets, smaller ones first; None where there are more than ``most``."""
    before = [sum(1 << source for source in sources) for sources in work.before]
    level = {0: [atom for atom, sources in enumerate(before) if not sources]}
    found = [0]
    while level:
        following: dict[int, list[int]] = {}
        for downset, ready in level.items():
            for atom in ready:
                larger = downset | 1 << atom
                if larger not in following:
                    following[larger] = [other for other in ready if other != atom]
                    following[larger] += [r for r in work.after[atom] if before[r] & ~larger == 0]
        found += following
        if len(found) > most:
            return None
        level = following
    return found


class Search:
    """Branch and bound over chains of downsets, with links, limits and all."""

    def __init__(self, work: Work, machine: Machine, sets: list[int]) -> None:
        """Args: ``sets`` are all downsets of the work, as bit sets, the smaller ones first."""
        self.work = work
        self.machine = machine
        self.sets = sets
        self.left = _EXPANSIONS
        self._values = [
            (
                None if value.source is None else 1 << value.source,
                sum(1 << reader for reader in value.readers),
                value,
            )
            for value in work.transfers
        ]
        self.cost = cache(self._cost)
        self.ahead = cache(self._ahead)

    def better(self, limit: float) -> tuple[list[int] | None, bool]:
        """An assignment whose slowest stage takes less than ``limit``, or None where none was
        found; and whether all were looked at, so that no other is faster."""
        self.limit = limit
        self.found: list[int] | None = None
        self.left = _EXPANSIONS
        self._extend([0], 0.0)
        return self.found, self.left > 0

    def _extend(self, chain: list[int], slowest: float) -> None:
        stage = len(chain) - 1
        if stage == self.machine.stages:
            division = weigh(self.work, self.machine, self._stage_of(chain))
            if division.fits(self.machine) and division.slowest < self.limit:
                self.limit, self.found = division.slowest, list(division.stage_of)
            return
        options = sorted(
            (max(slowest, self.cost(stage, chain[-1], end), self.ahead(stage + 1, end)), end)
            for end in self._ends(stage, chain[-1])
        )
        for bound, end in options:
            if bound >= self.limit or self.left <= 0:
                return
            self.left -= 1
            self._extend([*chain, end], max(slowest, self.cost(stage, chain[-1], end)))

    def _ends(self, stage: int, start: int) -> list[int]:
        """The downsets that a stage can end at: it must take something."""
        ends = self.sets if stage < self.machine.stages - 1 else self.sets[-1:]
        return [end for end in ends if end != start and start & ~end == 0]

    def _ahead(self, stage: int, start: int) -> float:
        """What the slowest of the stages from this one on takes at least."""
        if stage == self.machine.stages:
            return 0.0 if start == self.sets[-1] else math.inf
        return min(
            (
                max(self.cost(stage, start, end), self.ahead(stage + 1, end))
                for end in self._ends(stage, start)
            ),
            default=math.inf,
        )

    def _cost(self, stage: int, start: int, end: int) -> float:
        """Seconds of a stage at least, infinite where it cannot keep its limit."""
        machine, work = self.machine, self.work
        inside = end & ~start
        atoms = [atom for atom in range(len(work)) if inside >> atom & 1]
        seconds = math.fsum(work.seconds[atom] for atom in atoms) / machine.speeds[stage]
        if not machine.linked and not machine.limited:
            return seconds
        saving, receiving = machine.held[stage]
        held = sum(work.resident[atom] for atom in atoms)
        undo = sum(work.undo[atom] for atom in atoms)
        kept = saving * sum(work.saved[atom] for atom in atoms)
        for source, readers, value in self._values:
            born = start & (readers if source is None else source)
            if born:
                if readers & inside:
                    kept += receiving * value.bytes
                    seconds += self._least(value, [(k, stage) for k in range(stage)])
            elif inside & (readers if source is None else source):
                held += value.resident
                undo += value.undo
                if readers & ~end:
                    later = range(stage + 1, machine.stages)
                    seconds += self._least(value, [(stage, k) for k in later])
        if machine.limited and held + max(kept, undo) > machine.rooms[stage]:
            return math.inf
        return seconds

    def _least(self, value: Transfer, ways: list[tuple[int, int]]) -> float:
        if not self.machine.linked:
            return 0.0
        return min((self.machine.transfer_seconds(a, b, value) for a, b in ways), default=0.0)

    def _stage_of(self, chain: list[int]) -> list[int]:
        return [
            next(stage for stage, end in enumerate(chain[1:]) if end >> atom & 1)
            for atom in range(len(self.work))
        ]
