"""Lower bounds on the slowest stage, which no partition of a graph can beat.

A downset holds with an atom all that is before it, and without an atom nothing that is after it.
So an atom g forbids an interval of work to all downsets, those between what is after it being
left out and what is before it being taken in::

    without g:  at most total − after(g) − g          with g:  at least before(g) + g

In a chain these intervals leave the sums of its prefixes and nothing else, and the bound is exact.

Memory limits set another bound: the first k stages together can keep no more than all of their
memory, so that they do no more than the most work that fits in there, and the other stages must do
the rest. The same holds from the end.

``sent_apart`` counts a value as often as it is sent, where the work between its readers keeps them
apart, so that bounds and cuts know of it.

before:  x → pool, cat                 where 20 s of work lie between pool and cat
after:   x → pool, and x → cat         if no stage may take more than 10 s

A stage holds all that lies between two atoms that it holds, so these two never share one.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fxpipe.passes.partition.solver.orders import alone, latest_sources, trees
from fxpipe.passes.partition.solver.runs import Runs
from fxpipe.passes.partition.work import Machine, Transfer, Work

_PLANES = 24
_PAIRS = 2_000_000
"""Runs of a chain to look at for each stage: where the rest of a graph may lie anywhere beside its
chain, there are too many, and they bound little."""
_LIGHT = 1e-3
"""Atoms lighter than this part of a stage are let pass: they move a bound by no more."""


def lower_bound(work: Work, machine: Machine) -> float:
    """Seconds that some stage takes at least: compute alone, memory limits left out."""
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
    """A lower bound with links and memory, from the heaviest chain of atoms.

    It counts what the chain sends and keeps, as if each value were sent to one stage only, over the
    stage's fastest link, and as if memory held nothing but the chain.

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
    # all of the chain may be taken in before the rest of the work is: one place more, at the end
    bounds = [*least, work.total], [*most, work.total, work.total]
    runs = Runs(work, machine, chain, bounds)
    left = _PAIRS * machine.stages
    guess = high / (1 + slack)  # if no partition is so fast, the known one is good enough
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
    """Seconds that some stage takes at least, if all keep their limits; infinite if none can.

    What may be chosen is eased in three ways: an atom stands behind one other alone, the last that
    it reads (from the end, before the first that reads it); it may be taken in part; and what
    stages receive, and keep to undo an update, takes no memory.
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
    """Whether stages of at most ``limit`` seconds can end at allowed sums, and take in all."""
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
    """For each heavy atom the open interval of work that no downset has."""
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
    """Overlapping intervals as one; those that touch leave the point between them."""
    merged: list[tuple[float, float]] = []
    for low, high in sorted(gaps):
        if merged and low < merged[-1][1] * (1 - 1e-12):
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return merged


def _eased(machine: Machine) -> Iterator[tuple[float, Sequence[float]]]:
    """How often every stage keeps what is saved, at least, with stage → the memory that it has.

    With as many as the stage that keeps the fewest micro-batches; or else with the memory of all
    as if they kept as many as the one that keeps the most, where parameters count the less.
    """
    peaks = [saving for saving, _ in machine.held]
    yield min(peaks), machine.rooms
    if min(peaks) < max(peaks) and min(peaks) > 0:
        most = max(peaks)
        yield most, [room * most / own for room, own in zip(machine.rooms, peaks, strict=True)]


def _left_over(
    steps: Sequence[tuple[float, float]],
    rooms: Sequence[float],
    speeds: Sequence[float],
    total: float,
) -> float:
    """The bound from one side; ``steps`` are seconds a byte, and bytes, of what fills the memory,
    the densest first."""
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
    """For each atom those before it and those after it, as bit sets."""

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
    """Weighs bit sets of atoms: a plane of bits for each binary digit of their weights."""

    def __init__(self, work: Work) -> None:
        self.unit = work.total / (1 << _PLANES) or 1.0
        self.planes = [0] * (_PLANES + 1)
        for atom, seconds in enumerate(work.seconds):
            units = int(seconds / self.unit)
            for digit in range(units.bit_length()):
                if units >> digit & 1:
                    self.planes[digit] |= 1 << atom

    def least(self, atoms: int) -> float:
        """Seconds of a set, at least: weights are rounded down."""
        if not atoms:
            return 0.0
        units = sum((plane & atoms).bit_count() << d for d, plane in enumerate(self.planes))
        return units * self.unit

    def most(self, atoms: int) -> float:
        """Seconds of a set, at most."""
        return self.least(atoms) + atoms.bit_count() * self.unit if atoms else 0.0


def _heaviest_chain(work: Work) -> list[int]:
    """The path through the graph with the most work, and of these one with many atoms."""
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
    """The same work, in which divisions that take ``cap`` seconds at most cost the same as before;
    but what is sent to several stages is several values, wherever that is sure.
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
        readers = value.readers
        # of a shared parameter the first reader's stage is the owner of all
        groups: list[list[int]] = [] if value.source is not None else [list(readers)]
        for reader in readers if value.source is not None else ():
            near = [g for g in groups if not all(apart(other, reader) for other in g)]
            groups = [g for g in groups if g not in near]
            groups.append([*(other for g in near for other in g), reader])
        yield from (replace(value, readers=tuple(group)) for group in groups)

    transfers = (part for value in work.transfers for part in parts(value))
    return replace(work, transfers=tuple(transfers))
