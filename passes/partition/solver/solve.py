"""Divide work among stages: the fastest slowest stage, with a proof of how near it is, then the
fewest bytes.

1. The best cut of the program's order into runs, and a lower bound. A model whose atoms follow
   one another is done here: both are exact.
2. Where they differ by more than SLACK: other orders, and dynamic programming over the downsets
   where there are not too many, which give better cuts, better bounds, or both. Where there are
   too many, as in wide graphs, over those of a contracted graph: that gives better cuts and no
   bound, so where links or limits matter the gap may stay; it is told.
3. Of the cuts within SLACK of the bound, the one that sends the fewest bytes.

What each part is worth was measured on the models of the benchmarks in 2 to 8 stages, over links
and within limits, on costs that were recorded once. Without contraction the slowest stage takes up
to 22 % longer (T5 over links), without counting values as often as they are sent 15 % (a U-Net over
links), without the search of small graphs 9 % (ViT over links), without the lattice of downsets 6 %
(BART over links). Without packing, BART on equal devices loses its proof. Without the bound by a
chain, U-Nets and GPT-2 take twice the time in eight stages, for where a model nearly is a chain it
proves the first cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fxpipe.passes.partition.solver.bound import chain_bound, lower_bound, memory_bound, sent_apart
from fxpipe.passes.partition.solver.downsets import (
    Search,
    TooManyError,
    contractions,
    downsets,
    pack,
)
from fxpipe.passes.partition.solver.lattice import Lattice
from fxpipe.passes.partition.solver.orders import orders
from fxpipe.passes.partition.solver.runs import Runs, equal_runs
from fxpipe.passes.partition.work import Division, Machine, Work, weigh
from fxpipe.torchtools.state import intra_op_threads

SLACK = 0.01
"""How much slower than the best the slowest stage may be: measured times are no exacter."""

_CAPS = (1.02, 1.1, 1.5, 4.0, 16.0, 64.0)
"""Times the bound, one after the other until there is a cut: a narrow one is found much faster."""

_GUESSES = 10
_LIGHT = 0.002
_PAIRS = 200_000
_DOWNSETS = 4_000
_COARSE = 3_000
_FINE = 10_000
_PACKED = 15_000
_CONTRACTED = 2_000


@dataclass(frozen=True)
class Solution:
    """A division of the atoms among stages, with a lower bound.

    Attributes:
        division: the assignment.
        bound: seconds that the slowest stage of any assignment takes at least.
    """

    division: Division
    bound: float

    @property
    def gap(self) -> float:
        """How far the slowest stage is above the bound, relative to it; 0 is proven the best."""
        return max(self.division.slowest / self.bound - 1, 0.0) if self.bound else 0.0


@intra_op_threads(1)  # the tables are small: starting threads would take longer
def solve(work: Work, machine: Machine, layers: Sequence[Hashable] = ()) -> Solution | None:
    """The best division that was found; None where none keeps the memory limits.

    There are at least as many atoms as stages. To save bytes, the slowest stage never becomes
    slower than the best cut between ``layers`` (atom → the layer that it belongs to) has it.
    """
    return _Solver(work, machine, layers).run()


@intra_op_threads(1)
def least_limits(work: Work, machine: Machine) -> Division:
    """The division whose memory comes nearest to the limits, by the program's order: the one
    that needs the least when all limits grow in proportion."""
    low, high = 1.0, 2.0
    best: Division | None = None
    while best is None or high > low * 1.001:
        scale = high if best is None else math.sqrt(low * high)
        eased = replace(
            machine,
            limits=tuple(limit * scale for limit in machine.limits),
            per_byte=(),
            per_message=(),
        )
        cuts = Runs(work, eased, range(len(work))).cut("bytes", math.inf)
        if cuts is not None:
            found = weigh(work, machine, _stages(range(len(work)), cuts))
            best, high = found, min(scale, _excess(found, machine))
        else:
            low, high = scale, scale * 4 if best is None else high
    return best


class _Solver:
    def __init__(self, work: Work, machine: Machine, layers: Sequence[Hashable]) -> None:
        self.work = work
        self.machine = machine
        self.layers = layers
        self.sent = work  # where links cost: each value as often as it is known to be sent
        self.vain = False  # whether no run of the last order kept its limit
        self.low = max(lower_bound(work, machine), memory_bound(work, machine))
        self.best: Division | None = None

    @property
    def proven(self) -> bool:
        return self.best is not None and self.best.slowest <= self.low * (1 + SLACK)

    def run(self) -> Solution | None:
        if self.low == math.inf:
            return None
        for order in _distinct(orders(self.work, self.machine, self.low)):
            self._try_order(order)
            if self.proven:
                break
        else:
            self._search()
        if self.best is None:
            return None
        return Solution(self._with_fewest_bytes(self.best), self.low)

    def _search(self) -> None:
        """Better divisions and a better bound, where the graph is small or narrow enough."""
        if self.best is not None and not self.machine.computes_alone:
            self.sent = sent_apart(self.work, self.machine, self.best.slowest)
            if self.sent.transfers != self.work.transfers:
                self._try_order(_by_stage(self.best.stage_of))
            self.low = chain_bound(self.sent, self.machine, self.low, self.best.slowest, SLACK)
        self._pack()
        if self.proven:
            return
        sets = downsets(self.work, _DOWNSETS)
        if sets is None:
            self._through_contraction()
            return
        if len(self.work) > 64 or len(sets) ** 2 * self.machine.stages > _PAIRS:
            if not self.machine.computes_alone:
                self._through_lattice(Lattice(self.sent, self.machine, sets))
            return
        search = Search(self.work, self.machine, sets)
        found, all_seen = search.better(math.inf if self.best is None else self.best.slowest)
        if found is not None:
            self.best = weigh(self.work, self.machine, found)
        if all_seen and self.best is not None:
            self.low = max(self.low, self.best.slowest)

    def _through_lattice(self, lattice: Lattice) -> None:
        """The best of all divisions, but for values that several stages read."""
        cap = self._known()
        for fastest in (False, True) if self.machine.linked else (True,):
            way = lattice.best(cap, fastest=fastest)
            if way is not None:
                self._offer(weigh(self.work, self.machine, way[1]))
            if fastest and self.best is not None:
                bound = cap if way is None else way[0]
                self.low = max(self.low, min(bound, self.best.slowest))

    def _through_contraction(self) -> None:
        """Better divisions of a graph with too many downsets: those of one with few."""
        if len(self.work) > _CONTRACTED:
            return
        alone = self.machine.computes_alone
        levels = []
        for coarse, atom_of in contractions(self.work):
            sets = downsets(coarse, _PACKED if alone else _FINE)
            if sets is not None:
                levels.append((coarse, atom_of, sets))
                if alone or len(sets) <= _COARSE:
                    break
        # what the coarsest graph finds narrows the search of the finest
        for coarse, atom_of, sets in [*levels[:1], *levels[1:][-1:]][::-1]:
            if alone:
                self._pack_contracted(coarse, atom_of)
            elif not self.proven:
                way = Lattice(coarse, self.machine, sets).best(self._known(), fastest=False)
                self._expand(None if way is None else way[1], atom_of)

    def _pack_contracted(self, coarse: Work, atom_of: Sequence[int]) -> None:
        """Guess as ``_pack`` does; what no division of the coarse graph keeps bounds nothing."""
        assert self.best is not None
        low = guess = self.low * (1 + SLACK / 2)
        for _ in range(_GUESSES // 2):
            try:
                packed = pack(coarse, self.machine, guess, 0.0)
            except TooManyError:
                return
            self._expand(packed, atom_of)
            if self.proven:
                return
            low = guess if packed is None else low
            guess = (low + self.best.slowest) / 2

    def _expand(self, coarse: Sequence[int] | None, atom_of: Sequence[int]) -> None:
        """Keep a division of a contracted graph, and what cutting its order anew makes of it."""
        if coarse is not None:
            stage_of = [coarse[atom] for atom in atom_of]
            self._offer(weigh(self.work, self.machine, stage_of))
            self._try_order(_by_stage(stage_of))

    def _pack(self) -> None:
        """Guess the seconds of the slowest stage between the bound and what was found."""
        if len(self.work) > _CONTRACTED and not self.machine.computes_alone:
            return  # it knows of compute alone, which such graphs can nearly always be divided by
        high = self.low * 2 if self.best is None else self.best.slowest
        light = _LIGHT * self.low * min(self.machine.speeds)
        for _ in range(_GUESSES):
            if high <= self.low * (1 + SLACK / 2):
                return
            guess = (self.low + high) / 2
            try:
                packed = pack(self.work, self.machine, guess, light)
            except TooManyError:
                return
            if packed is None:
                self.low = guess
            else:
                self._try_order(_by_stage(packed))
                high = guess

    def _try_order(self, order: Sequence[int]) -> None:
        """Keep the best cut of an order into runs, where it is better than what is known."""
        cuts: list[int] | None
        if self.machine.free:
            seconds = (self.work.seconds[atom] for atom in order)
            cuts = equal_runs([0.0, *itertools.accumulate(seconds)], self.machine.stages)
        else:
            runs = Runs(self.sent, self.machine, order)
            found = (runs.cut("seconds", cap) for cap in self._caps())
            cuts = next((each for each in found if each is not None), None)
            self.vain = cuts is None
        if cuts is not None:
            self._offer(weigh(self.work, self.machine, _stages(order, cuts)))

    def _caps(self) -> Iterator[float]:
        """Seconds below which to look for a cut: none that is no better than what is known."""
        known = self._known()
        if not self.vain:
            yield from (self.low * cap for cap in _CAPS if self.low * cap < known)
        yield known

    def _known(self) -> float:
        """Seconds that some division is known to keep, but for its memory."""
        if self.best is not None:
            return self.best.slowest
        return math.inf if self.machine.linked else self.work.total / min(self.machine.speeds)

    def _offer(self, found: Division) -> None:
        if found.fits(self.machine) and (self.best is None or found.slowest < self.best.slowest):
            self.best = found

    def _with_fewest_bytes(self, best: Division) -> Division:
        order = _by_stage(best.stage_of)
        cap = max(best.slowest, min(self.low * (1 + SLACK), self._between_layers()))
        cuts = Runs(self.work, self.machine, order).cut("bytes", cap)
        if cuts is None:
            return best
        found = weigh(self.work, self.machine, _stages(order, cuts))
        fits = found.fits(self.machine) and found.slowest <= cap * (1 + 1e-9)
        return found if fits and found.crossing <= best.crossing else best

    def _between_layers(self) -> float:
        """The slowest stage of the best cut between layers; infinite where it does not count."""
        if not self.machine.free or not self.layers:
            return math.inf
        seconds = itertools.accumulate(self.work.seconds)
        following = [*self.layers[1:], object()]
        ends = [
            done
            for done, here, other in zip(seconds, self.layers, following, strict=True)
            if here != other
        ]
        if len(ends) < self.machine.stages:
            return math.inf
        cuts = [0, *equal_runs([0.0, *ends], self.machine.stages), len(ends)]
        done = [0.0, *ends]
        return max(done[end] - done[start] for start, end in itertools.pairwise(cuts))


def _distinct(found: Iterable[Sequence[int]]) -> Iterator[Sequence[int]]:
    """Each order once."""
    seen: set[tuple[int, ...]] = set()
    for order in map(tuple, found):
        if order not in seen:
            seen.add(order)
            yield order


def _by_stage(stage_of: Sequence[int]) -> list[int]:
    """The atoms, stage after stage; in a stage as the program has them."""
    return sorted(range(len(stage_of)), key=stage_of.__getitem__)


def _stages(order: Sequence[int], cuts: Sequence[int]) -> list[int]:
    stage_of = [0] * len(order)
    for stage, (start, end) in enumerate(itertools.pairwise([0, *cuts, len(order)])):
        for atom in order[start:end]:
            stage_of[atom] = stage
    return stage_of


def _excess(division: Division, machine: Machine) -> float:
    """How many times its limit the fullest stage needs."""
    return max(
        load.memory / limit for load, limit in zip(division.loads, machine.limits, strict=True)
    )
