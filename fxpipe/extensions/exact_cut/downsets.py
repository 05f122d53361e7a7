"""Search the downsets of a graph, if they are few enough; exact on small and narrow graphs.

The first k stages together hold a downset, so a partition is a chain of downsets. Where branches
of a model meet in one value, the downsets before and after it add up instead of multiplying, so
that most models have few.

``contractions`` merges atoms, light ones first, so that wide graphs have few downsets, too.

before:  a (1 s) → b (1 s) → c (9 s), a → d (1 s) → c
after:   [a], [b, c], [d]; then [a, d], [b, c]; then [a, b, c, d]

An atom merges with its only reader, or with the only atom that it reads, which closes no cycle. A
division of a contracted graph is a division of the graph, but not the other way round. So
contraction finds good divisions and proves no bounds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

from fxpipe.passes.partition.work import Machine, Transfer, Work, sorted_by_rank, weigh

_STATES = 20_000
"""The most downsets that ``pack`` looks at, besides two for each atom."""
_EXPANSIONS = 20_000
"""The most partial chains that ``Search`` extends."""


class TooManyError(Exception):
    """There are too many downsets to look at."""


def pack(work: Work, machine: Machine, limit: float, light: float) -> list[int] | None:
    """Return atom → stage, with at most ``limit`` seconds of compute in each stage; None if there
    is no such assignment.

    This is dynamic programming over downsets. Of two ways to fill the same downset, the one in an
    earlier stage is at least as good, or in the same stage the one with less in it; so one state
    for each downset is enough. The lightest atoms, ``light`` seconds in all, count as weightless:
    they go wherever they first can, and do not multiply the downsets.

    Raises:
        TooManyError: there are too many downsets to tell.
    """
    seconds = _without_light(work, light)
    total = math.fsum(seconds)
    ahead = [math.fsum(machine.speeds[stage:]) for stage in range(machine.stages + 1)]
    before = [sum(1 << source for source in sources) for sources in work.before]
    states = _STATES + 2 * len(work)
    # level and following: downset → (last stage, seconds in that stage, ready atoms)
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
                state = following.get(key)
                if state is None or (k, filled) < state[:2]:
                    following[key] = (k, filled, free)
                    origin[key] = (downset, k)
                    done[key] = taken
            if len(done) > states:
                raise TooManyError
        level = following
    if not level:
        return None
    stage_of, downset = [0] * len(work), everything
    while downset:
        earlier, stage = origin[downset]
        for atom in members(downset & ~earlier):
            stage_of[atom] = stage
        downset = earlier
    return stage_of


def _without_light(work: Work, light: float) -> list[float]:
    """The seconds of atoms, 0 for the lightest ones as long as these sum to at most ``light``."""
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
    """Take in all ready atoms without weight; return the larger downset and the ready atoms."""
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


def members(atoms: int) -> Iterator[int]:
    """Yield the atoms of a bit set."""
    while atoms:
        yield (atoms & -atoms).bit_length() - 1
        atoms &= atoms - 1


def stages_between(chain: Iterable[int], atoms: int) -> list[int]:
    """Turn a chain of downsets, from the empty one to that of all atoms, into atom → stage."""
    stage_of = [0] * atoms
    for stage, (start, end) in enumerate(pairwise(chain)):
        for atom in members(end & ~start):
            stage_of[atom] = stage
    return stage_of


def downsets(work: Work, most: int) -> list[int] | None:
    """Return all downsets as bit sets, smaller ones first; None if there are more than ``most``."""
    before = [sum(1 << source for source in sources) for sources in work.before]
    level = {0: [atom for atom, sources in enumerate(before) if not sources]}
    sets = [0]
    while level:
        following: dict[int, list[int]] = {}
        for downset, ready in level.items():
            for atom in ready:
                larger = downset | 1 << atom
                if larger not in following:
                    following[larger] = [other for other in ready if other != atom]
                    following[larger] += [r for r in work.after[atom] if before[r] & ~larger == 0]
        sets += following
        if len(sets) > most:
            return None
        level = following
    return sets


class Search:
    """Branch and bound over chains of downsets, with links and memory limits.

    ``sets`` are the result of ``downsets`` for the work.
    """

    def __init__(self, work: Work, machine: Machine, sets: list[int]) -> None:
        self.work = work
        self.machine = machine
        self.sets = sets
        self._values: list[tuple[int, int, Transfer]] = []  # with masks of its makers and readers
        for value in work.transfers:
            readers = sum(1 << reader for reader in value.readers)
            makers = readers if value.source is None else 1 << value.source
            self._values.append((makers, readers, value))
        self.cost = cache(self._cost)
        self.ahead = cache(self._ahead)

    def better(self, limit: float) -> tuple[list[int] | None, bool]:
        """Return the fastest atom → stage whose slowest stage takes less than ``limit``, or None;
        and whether the search was complete, so that nothing faster exists."""
        self.limit = limit
        self.found: list[int] | None = None
        self.left = _EXPANSIONS
        self._extend([0], 0.0)
        return self.found, self.left > 0

    def _extend(self, chain: list[int], slowest: float) -> None:
        stage = len(chain) - 1
        if stage == self.machine.stages:
            division = weigh(self.work, self.machine, stages_between(chain, len(self.work)))
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
        """The downsets where a stage that begins at ``start`` can end; it must not be empty."""
        ends = self.sets if stage < self.machine.stages - 1 else self.sets[-1:]
        return [end for end in ends if end != start and start & ~end == 0]

    def _ahead(self, stage: int, start: int) -> float:
        """The least seconds of the slowest stage from ``stage`` on."""
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
        """The least seconds of a stage; infinite if it exceeds its memory limit."""
        machine, work = self.machine, self.work
        inside = end & ~start
        atoms = [*members(inside)]
        seconds = math.fsum(work.seconds[atom] for atom in atoms) / machine.speeds[stage]
        if not machine.linked and not machine.limited:
            return seconds
        saving, receiving = machine.held[stage]
        held = sum(work.resident[atom] for atom in atoms)
        kept = saving * sum(work.saved[atom] for atom in atoms)
        for makers, readers, value in self._values:
            if start & makers:
                if readers & inside:
                    kept += receiving * value.bytes
                    seconds += self._least(value, [(k, stage) for k in range(stage)])
            elif inside & makers:
                held += value.resident
                if readers & ~end:
                    later = range(stage + 1, machine.stages)
                    seconds += self._least(value, [(stage, k) for k in later])
        if machine.limited and held + kept > machine.rooms[stage]:
            return math.inf
        return seconds

    def _least(self, value: Transfer, links: list[tuple[int, int]]) -> float:
        if not self.machine.linked:
            return 0.0
        return min((self.machine.transfer_seconds(a, b, value) for a, b in links), default=0.0)


_FINEST = 2.0**-12
"""The share of all work that a merged atom may have at first."""
_STEP = 2.0**0.5
"""The factor between one such share and the next."""


def contractions(work: Work) -> Iterator[tuple[Work, list[int]]]:
    """Yield coarser and coarser graphs, each with atom → merged atom."""
    merging = _Merging(work)
    most = _FINEST * work.total
    while most < work.total:
        if merging.merge(most):
            yield merging.contracted()
        most *= _STEP


class _Merging:
    """Merges atoms; a merged atom goes by the number of its first atom."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._into = list(range(len(work)))
        self.seconds = dict(enumerate(work.seconds))
        self.before = {atom: set(sources) for atom, sources in enumerate(work.before)}
        self.after = {atom: set(readers) for atom, readers in enumerate(work.after)}

    def merge(self, most: float) -> bool:
        """Merge neighbours with at most ``most`` seconds together, light atoms first; return
        whether any were."""
        merged = False
        waiting = [(self.seconds[a], a) for a in self.seconds]
        heapq.heapify(waiting)
        while waiting:
            seconds, atom = heapq.heappop(waiting)
            if seconds != self.seconds.get(atom):
                continue  # the entry is older than a merge
            pairs = [(atom, r) for r in self.after[atom] if self._only_path(atom, r)]
            pairs += [(s, atom) for s in self.before[atom] if self._only_path(s, atom)]
            weights = [(self.seconds[a] + self.seconds[b], a, b) for a, b in pairs]
            together, source, reader = min(weights, default=(most + 1, 0, 0))
            if together <= most:
                self._unite(source, reader)
                heapq.heappush(waiting, (together, source))
                merged = True
        return merged

    def _only_path(self, source: int, reader: int) -> bool:
        return len(self.after[source]) == 1 or len(self.before[reader]) == 1

    def _unite(self, source: int, reader: int) -> None:
        self._into[reader] = source
        self.seconds[source] += self.seconds.pop(reader)
        before, after = self.before.pop(reader) - {source}, self.after.pop(reader)
        for other in before:
            self.after[other].discard(reader)
            self.after[other].add(source)
        for other in after:
            self.before[other].discard(reader)
            self.before[other].add(source)
        self.before[source] |= before
        self.after[source] |= after
        self.after[source].discard(reader)

    def contracted(self) -> tuple[Work, list[int]]:
        """Return the merged graph, and atom → merged atom."""
        ordered = sorted_by_rank(self.before, lambda atom, _: atom)
        number = {atom: place for place, atom in enumerate(ordered)}
        merged_into = [number[self._first(atom)] for atom in range(len(self._work))]

        def summed(amounts: Sequence[int]) -> list[int]:
            sums = [0] * len(number)
            for atom, amount in zip(merged_into, amounts, strict=True):
                sums[atom] += amount
            return sums

        resident = summed(self._work.resident)
        transfers: list[Transfer] = []
        for value in self._work.transfers:
            source = None if value.source is None else merged_into[value.source]
            readers = sorted({merged_into[reader] for reader in value.readers} - {source})
            if source is None and len(readers) == 1:
                resident[readers[0]] += value.resident
            elif readers:
                transfers.append(replace(value, source=source, readers=tuple(readers)))
        seconds = tuple(self.seconds[atom] for atom in number)
        saved = tuple(summed(self._work.saved))
        return Work(seconds, tuple(resident), saved, tuple(transfers)), merged_into

    def _first(self, atom: int) -> int:
        while self._into[atom] != atom:
            self._into[atom] = atom = self._into[self._into[atom]]
        return atom
