"""Compute lower bounds on the slowest stage's seconds, for all partitions of a graph.

``lower_bound`` uses compute alone. A downset with an atom g also holds everything before g, and a
downset without g holds nothing after g. So there is an interval that no downset's work falls into::

    without g:  at most total − after(g) − g          with g:  at least before(g) + g

In a chain these intervals leave only the sums of its prefixes, and the bound is exact.

``memory_bound`` uses memory limits. The first k stages together can do at most the most work that
fits into their memory, and the other stages must do the rest. The same holds from the end.

``sent_apart`` counts a value once for each stage that it is surely sent to, so that bounds and cuts
include those costs.

before:  x → pool, cat                 where 20 s of work lie between pool and cat
after:   x → pool, and x → cat         if no stage may take more than 10 s

A stage also holds all that lies between two of its atoms, so these two never share a stage.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fxpipe.extensions.exact_cut.orders import alone, latest_sources, trees
from fxpipe.extensions.exact_cut.runs import Runs
from fxpipe.passes.partition.work import Machine, Transfer, Work

_PLANES = 24
"""Binary digits of a weight in ``Scale``."""
_PAIRS = 2_000_000
"""The most runs of a chain to look at for each stage. Where most of the graph lies beside its
chain there are more, but then the chain bounds little."""
_LIGHT = 1e-3
"""Atoms lighter than this share of a stage are skipped: they cannot move the bound by more."""


def lower_bound(work: Work, machine: Machine) -> float:
    """Return a lower bound from compute alone, without memory limits and links."""
    heaviest = max(work.seconds, default=0.0) / max(machine.speeds)
    low = max(work.total / sum(machine.speeds), heaviest)
    light = _LIGHT * low * min(machine.speeds)
    gaps = _merged(_gaps(work, light))
    high = max(low, work.total / max(machine.speeds))
    if _reaches(low, gaps, machine, work.total):
        return low
    for _ in range(40):
        guess = (low + high) / 2
        if _reaches(guess, gaps, machine, work.total):
            high = guess
        else:
            low = guess
    return low


def chain_bound(work: Work, machine: Machine, low: float, high: float, slack: float = 0.0) -> float:
    """Return a lower bound with links and memory limits, from the heaviest chain of atoms.

    It counts what the chain sends and keeps. It assumes that each value is sent to one stage only,
    over its stage's fastest link, and that memory holds nothing but the chain.

    Args:
        low: a known lower bound.
        high: seconds of the slowest stage of a known partition.
        slack: the relative gap to the bound at which that partition is good enough.
    """
    chain = _heaviest_chain(work)
    reach = Reach(work)
    weigh = Scale(work)
    least = [0.0]
    most: list[float] = []
    for atom in chain:
        before, after = reach.before[atom], reach.after[atom]
        least.append(weigh.least(before | 1 << atom))
        most.append(work.total - weigh.least(after | 1 << atom))
    # a last place: the end of all work, which stages may reach only after the end of the chain
    bounds = [*least, work.total], [*most, work.total, work.total]
    runs = Runs(work, machine, chain, bounds)
    left = _PAIRS * machine.stages
    guess = high / (1 + slack)  # if no partition is this fast, the known one is good enough
    for _ in range(8):
        if high <= low * 1.002:
            break
        guess = guess if low < guess < high else (low + high) / 2
        left -= runs.pairs(guess)
        if left < 0:
            break
        if runs.cut("seconds", guess, fastest=True) is None:
            low = guess
        else:
            high = guess
        guess = (low + high) / 2
    return low


def memory_bound(work: Work, machine: Machine) -> float:
    """Return a lower bound from memory limits and compute; infinite if no partition keeps the
    limits.

    It relaxes the problem in three ways. An atom only has to come after one other, the last one
    that it reads (from the end: before the first one that reads it). A stage may take a part of an
    atom. What stages receive takes no memory.
    """
    if not machine.limited:
        return 0.0
    count = len(work)
    readers = (work.after[atom] for atom in reversed(range(count)))
    sides = (
        (False, latest_sources(work)),
        (True, [count - 1 - atoms[0] if atoms else None for atoms in readers]),
    )
    bound = 0.0
    for saving, rooms in _eased(machine):
        for backward, parents in sides:
            blocks = alone(work, saving)
            speeds = machine.speeds
            if backward:
                blocks, rooms, speeds = blocks[::-1], rooms[::-1], speeds[::-1]
            roots = [block for block in trees(blocks, parents) if block.part_of is None]
            steps = sorted(((b.density, b.kept) for b in roots), reverse=True)
            bound = max(bound, _left_over(steps, rooms, speeds, work.total))
    return bound


def _reaches(
    limit: float, gaps: Sequence[tuple[float, float]], machine: Machine, total: float
) -> bool:
    """Whether stages of at most ``limit`` seconds that end outside the gaps can do all work."""
    starts = [gap[0] for gap in gaps]
    done = 0.0
    for speed in machine.speeds:
        done += limit * speed
        if done >= total * (1 - 1e-12):
            return True
        place = bisect.bisect_left(starts, done) - 1
        if place >= 0 and done < gaps[place][1]:
            done = gaps[place][0]
    return False


def _gaps(work: Work, light: float) -> Iterator[tuple[float, float]]:
    """For each heavy atom, yield the open interval that no downset's work falls into."""
    reach = Reach(work)
    weigh = Scale(work)
    places = [0.0, *itertools.accumulate(work.seconds)]
    everything = (1 << len(work)) - 1
    for atom, seconds in enumerate(work.seconds):
        if seconds < light:
            continue
        earlier = (1 << atom) - 1
        apart = everything & ~(reach.before[atom] | reach.after[atom] | 1 << atom)
        low = places[atom] + weigh.most(apart & ~earlier)
        high = places[atom + 1] - weigh.most(apart & earlier)
        if low < high:
            yield low, high


def _merged(gaps: Iterator[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge overlapping intervals; those that only touch leave out the point between them."""
    merged: list[tuple[float, float]] = []
    for low, high in sorted(gaps):
        if merged and low < merged[-1][1] * (1 - 1e-12):
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return merged


def _eased(machine: Machine) -> Iterator[tuple[float, Sequence[float]]]:
    """Yield problems where all stages hold equally many micro-batches: how many, and stage → room.

    The first has the fewest that any stage holds. The second has the most that any stage holds, and
    scales up the other stages' rooms, so that their parameters count less than they should.
    """
    fewest, most = min(machine.peaks), max(machine.peaks)
    yield fewest, machine.rooms
    if 0 < fewest < most:
        yield most, [room * most / k for room, k in zip(machine.rooms, machine.peaks, strict=True)]


def _left_over(
    steps: Sequence[tuple[float, float]],
    rooms: Sequence[float],
    speeds: Sequence[float],
    total: float,
) -> float:
    """Return the bound from one side: fill stage after stage, the densest work first, and divide
    what is left by the speed of the later stages. ``steps`` are (seconds per byte, bytes).
    """
    done, bound, position, left = 0.0, 0.0, 0, steps[0][1] if steps else 0.0
    for stage, room in enumerate(rooms):
        while room > 0 and position < len(steps):
            density, taken = steps[position][0], min(room, left)
            done += density * taken
            room -= taken
            left -= taken
            if left <= 0:
                position += 1
                left = steps[position][1] if position < len(steps) else 0.0
        rest, others = total - done, sum(speeds[stage + 1 :])
        if rest > 1e-9 * total:
            bound = max(bound, rest / others if others else math.inf)
    return bound


class Reach:
    """All atoms before and after each atom, directly or not, as bit sets."""

    def __init__(self, work: Work) -> None:
        self.before = [0] * len(work)
        self.after = [0] * len(work)
        for atom, sources in enumerate(work.before):
            for source in sources:
                self.before[atom] |= self.before[source] | 1 << source
        for atom in reversed(range(len(work))):
            for reader in work.after[atom]:
                self.after[atom] |= self.after[reader] | 1 << reader


class Scale:
    """Weighs bit sets of atoms quickly: it has a set of atoms for each binary digit of weights."""

    def __init__(self, work: Work) -> None:
        self.unit = work.total / (1 << _PLANES) or 1.0
        self.planes = [0] * (_PLANES + 1)
        for atom, seconds in enumerate(work.seconds):
            units = int(seconds / self.unit)
            for digit in range(units.bit_length()):
                if units >> digit & 1:
                    self.planes[digit] |= 1 << atom

    def least(self, atoms: int) -> float:
        """The seconds of a set, with each weight rounded down."""
        if not atoms:
            return 0.0
        units = sum((plane & atoms).bit_count() << d for d, plane in enumerate(self.planes))
        return units * self.unit

    def most(self, atoms: int) -> float:
        """The seconds of a set, with each weight rounded up."""
        return self.least(atoms) + atoms.bit_count() * self.unit if atoms else 0.0


def _heaviest_chain(work: Work) -> list[int]:
    """The path through the graph with the most work; among equals one with many atoms."""
    heaviest: list[tuple[float, int]] = []
    for atom, sources in enumerate(work.before):
        seconds, source = max(((heaviest[s][0], s) for s in sources), default=(0.0, -1))
        heaviest.append((seconds + work.seconds[atom] + work.total * 1e-12, source))
    atom = max(range(len(work)), key=lambda a: heaviest[a][0])
    chain = [atom]
    while (atom := heaviest[atom][1]) >= 0:
        chain.append(atom)
    return chain[::-1]


_ROUNDING = 1 + 1e-9


def sent_apart(work: Work, machine: Machine, cap: float) -> Work:
    """Return the same work with a value split in several where it surely is sent to several stages.

    Divisions whose slowest stage takes at most ``cap`` seconds cost the same as before.
    """
    if all(len(value.readers) == 1 for value in work.transfers):
        return work
    reach, scale = Reach(work), Scale(work)
    most = cap * max(machine.speeds) * _ROUNDING

    def apart(first: int, second: int) -> bool:
        if not reach.after[first] >> second & 1:
            return False
        between = reach.after[first] & reach.before[second]
        return scale.least(between | 1 << first | 1 << second) > most

    def parts(value: Transfer) -> Iterator[Transfer]:
        if value.source is None:  # a shared parameter stays whole: all readers have one owner
            yield value
            return
        groups: list[list[int]] = []
        for reader in value.readers:
            near = [g for g in groups if not all(apart(earlier, reader) for earlier in g)]
            groups = [g for g in groups if g not in near]
            groups.append([*(earlier for g in near for earlier in g), reader])
        yield from (replace(value, readers=tuple(group)) for group in groups)

    transfers = (part for value in work.transfers for part in parts(value))
    return replace(work, transfers=tuple(transfers))
