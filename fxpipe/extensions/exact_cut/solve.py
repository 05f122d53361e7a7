"""Divide work among stages: minimise the slowest stage, with a proven bound, then the bytes sent.

1. Cut the program's order into runs in the best way, and compute a lower bound. For a model that is
   a chain of atoms both are exact, and this is all.
2. If cut and bound differ by more than SLACK, try other orders, then dynamic programming over the
   downsets: this gives better cuts, better bounds, or both. Where there are too many downsets, as
   in wide graphs, use those of a contracted graph. They give better cuts and no bounds, so a gap
   may remain where links or limits matter; it is reported.
3. Among the cuts within SLACK of the bound, take the one that sends the fewest bytes.

Each part pays off on the models of the benchmarks, in 2 to 8 stages, over links and within limits.
The slowest stage takes up to 22 % longer without contraction (T5 over links), 15 % without
``sent_apart`` (a U-Net over links), 9 % without ``Search`` (ViT over links), and 6 % without the
lattice (BART over links). Without packing, BART on equal devices has no proof. Without
``chain_bound``, U-Nets and GPT-2 in eight stages take twice as long to solve, because it proves
the first cut of models that are nearly chains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from fxpipe.extensions.exact_cut.bound import chain_bound, lower_bound, memory_bound, sent_apart
from fxpipe.extensions.exact_cut.downsets import (
    Search,
    TooManyError,
    contractions,
    downsets,
    pack,
)
from fxpipe.extensions.exact_cut.lattice import Lattice
from fxpipe.extensions.exact_cut.orders import orders
from fxpipe.extensions.exact_cut.runs import Runs, equal_runs
from fxpipe.passes.partition.work import Division, Machine, Solution, Work, weigh
from fxpipe.torchtools.state import intra_op_threads

SLACK = 0.01
"""How much slower than the best the slowest stage may be: measured times are no more exact."""

_CAPS = (1.02, 1.1, 1.5, 4.0, 16.0, 64.0)
"""Caps on the slowest stage to try in turn, relative to the bound: tight ones are much faster."""

_GUESSES = 10
"""The most guesses of the slowest stage's seconds to try with ``pack``."""
_LIGHT = 0.002
"""``pack`` takes the lightest atoms as weightless, up to this share of the bound in all."""
_PAIRS = 200_000
"""The most pairs of downsets, times stages, for ``Search``."""
_DOWNSETS = 4_000
"""The most downsets of the graph itself to look at."""
_COARSE = 3_000
"""With this many downsets a contracted graph is coarse enough."""
_FINE = 10_000
"""The most downsets of a contracted graph to put into a lattice."""
_PACKED = 15_000
"""The most downsets of a contracted graph to pack."""
_CONTRACTED = 2_000
"""The most atoms of a graph to contract."""


@intra_op_threads(1)  # the tables are small: starting threads would take longer
def solve(work: Work, machine: Machine, layers: Sequence[Hashable] = ()) -> Solution | None:
    """Return the best division found; None if none keeps the memory limits.

    There must be at least as many atoms as stages. ``layers`` has each atom's layer: to save bytes,
    the slowest stage never becomes slower than in the best cut between layers.
    """
    return _Solver(work, machine, layers).run()


@intra_op_threads(1)
def least_limits(work: Work, machine: Machine) -> Division:
    """Return the cut of the program's order that comes nearest to the memory limits: it keeps them
    once all are scaled by the least common factor."""
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
            best = weigh(work, machine, _stages(range(len(work)), cuts))
            pairs = zip(best.loads, machine.limits, strict=True)
            high = min(scale, max(load.memory / limit for load, limit in pairs))
        else:
            low, high = scale, scale * 4 if best is None else high
    return best


class _Solver:
    def __init__(self, work: Work, machine: Machine, layers: Sequence[Hashable]) -> None:
        self.work = work
        self.machine = machine
        self.layers = layers
        self.sent = work  # the work after ``sent_apart``
        self.vain = False  # whether the last order had no cut within the limits
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
        """Look for better divisions and bounds, as far as the graph is small or narrow enough."""
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
        stage_of, complete = search.better(math.inf if self.best is None else self.best.slowest)
        if stage_of is not None:
            self.best = weigh(self.work, self.machine, stage_of)
        if complete and self.best is not None:
            self.low = max(self.low, self.best.slowest)

    def _through_lattice(self, lattice: Lattice) -> None:
        """Find the best division and a bound, up to the cost of values that several stages read."""
        cap = self._achievable()
        for fastest in (False, True) if self.machine.linked else (True,):
            path = lattice.best(cap, fastest=fastest)
            if path is not None:
                self._offer(path[1])
            if fastest and self.best is not None:
                bound = cap if path is None else path[0]
                self.low = max(self.low, min(bound, self.best.slowest))

    def _through_contraction(self) -> None:
        """Look for better divisions of a graph with too many downsets, among those of contracted
        graphs with few."""
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
        # the coarsest graph first: its result narrows the search of the finest
        for coarse, atom_of, sets in [*levels[:1], *levels[1:][-1:]][::-1]:
            if alone:
                self._pack_contracted(coarse, atom_of)
            elif not self.proven:
                path = Lattice(coarse, self.machine, sets).best(self._achievable(), fastest=False)
                self._expand(None if path is None else path[1], atom_of)

    def _pack_contracted(self, coarse: Work, atom_of: Sequence[int]) -> None:
        """Guess as ``_pack`` does. A guess that fails on the coarse graph proves no bound."""
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
        """Offer a division of a contracted graph, and the best cut of its order."""
        if coarse is not None:
            stage_of = [coarse[atom] for atom in atom_of]
            self._offer(stage_of)
            self._try_order(_by_stage(stage_of))

    def _pack(self) -> None:
        """Bisect the seconds of the slowest stage between the bound and the best division."""
        if len(self.work) > _CONTRACTED and not self.machine.computes_alone:
            return  # packing sees compute alone, and large graphs nearly always reach its bound
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
        """Offer the best cut of an order into runs."""
        cuts: list[int] | None
        if self.machine.free:
            seconds = (self.work.seconds[atom] for atom in order)
            cuts = equal_runs([0.0, *itertools.accumulate(seconds)], self.machine.stages)
        else:
            runs = Runs(self.sent, self.machine, order)
            attempts = (runs.cut("seconds", cap) for cap in self._caps())
            cuts = next((attempt for attempt in attempts if attempt is not None), None)
            self.vain = cuts is None
        if cuts is not None:
            self._offer(_stages(order, cuts))

    def _caps(self) -> Iterator[float]:
        """Yield the caps to try in turn, up to the seconds that are known to be achievable."""
        achievable = self._achievable()
        if not self.vain:
            yield from (self.low * cap for cap in _CAPS if self.low * cap < achievable)
        yield achievable

    def _achievable(self) -> float:
        """Seconds that some division is known to keep, perhaps without its memory limits."""
        if self.best is not None:
            return self.best.slowest
        return math.inf if self.machine.linked else self.work.total / min(self.machine.speeds)

    def _offer(self, stage_of: Sequence[int]) -> None:
        """Keep a division if it fits and is the fastest so far."""
        division = weigh(self.work, self.machine, stage_of)
        faster = self.best is None or division.slowest < self.best.slowest
        if faster and division.fits(self.machine):
            self.best = division

    def _with_fewest_bytes(self, best: Division) -> Division:
        """Return a division that sends fewer bytes and is nearly as fast, or ``best`` itself."""
        order = _by_stage(best.stage_of)
        cap = max(best.slowest, min(self.low * (1 + SLACK), self._between_layers()))
        cuts = Runs(self.work, self.machine, order).cut("bytes", cap)
        if cuts is None:
            return best
        division = weigh(self.work, self.machine, _stages(order, cuts))
        fits = division.fits(self.machine) and division.slowest <= cap * (1 + 1e-9)
        return division if fits and division.crossing <= best.crossing else best

    def _between_layers(self) -> float:
        """The slowest stage of the best cut between layers; infinite unless devices are equal and
        only compute counts."""
        if not self.machine.free or not self.layers:
            return math.inf
        seconds = itertools.accumulate(self.work.seconds)
        following = [*self.layers[1:], object()]
        ends = [0.0]
        ends += (
            done
            for done, here, after in zip(seconds, self.layers, following, strict=True)
            if here != after
        )
        if len(ends) <= self.machine.stages:
            return math.inf
        cuts = [0, *equal_runs(ends, self.machine.stages), len(ends) - 1]
        return max(ends[end] - ends[start] for start, end in itertools.pairwise(cuts))


def _distinct(candidates: Iterable[Sequence[int]]) -> Iterator[Sequence[int]]:
    """Yield each order once, without asking for more orders than needed."""
    seen: set[tuple[int, ...]] = set()
    for order in map(tuple, candidates):
        if order not in seen:
            seen.add(order)
            yield order


def _by_stage(stage_of: Sequence[int]) -> list[int]:
    """The atoms, stage after stage, and within a stage in the program's order."""
    return sorted(range(len(stage_of)), key=stage_of.__getitem__)


def _stages(order: Sequence[int], cuts: Sequence[int]) -> list[int]:
    stage_of = [0] * len(order)
    for stage, (start, end) in enumerate(itertools.pairwise([0, *cuts, len(order)])):
        for atom in order[start:end]:
            stage_of[atom] = stage
    return stage_of
