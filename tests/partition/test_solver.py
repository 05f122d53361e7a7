"""Dividing work among stages: against all legal assignments of small graphs, and large ones."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.passes.partition.solve import SLACK, Partitioner
from fxpipe.passes.partition.work import StageDevices, Transfer, Work
from tests.helpers.profiles import DEEP
from tests.helpers.works import MANY, chain, machines, works
from tests.oracles.every_division import fits, legal, weighed


@MANY
@given(st.data(), works(), st.integers(1, 3))
def test_no_run_of_the_programs_order_is_faster_and_limits_are_kept(
    data: st.DataObject, work: Work, stages: int
) -> None:
    machine = data.draw(machines(stages))
    candidates = list(legal(work, stages))
    if not candidates:
        return
    fitting = [c for c in candidates if fits(work, machine, c)]
    runs = [c for c in fitting if list(c) == sorted(c)]
    found = Partitioner().divide(work, machine)
    if found is None:
        assert not runs
        return
    assert found.stage_of in fitting
    seconds, crossing = weighed(work, machine, found.stage_of)
    assert max(seconds) == pytest.approx(found.slowest)
    assert crossing == found.crossing
    if runs and not machine.linked:
        best = min(max(weighed(work, machine, c)[0]) for c in runs)
        assert max(seconds) <= best * (1 + SLACK) + 1e-9


def blocks(count: int, stages: int, dice: random.Random) -> tuple[Work, StageDevices]:
    """Blocks of four atoms beside a shortcut, with links and limits, as residual networks have."""
    transfers = []
    for first in range(0, 5 * count, 5):
        a, b, c, d, after = range(first, first + 5)
        size = dice.randrange(1, 20)
        transfers += [Transfer(a, (b, d), size, True), Transfer(b, (c,), size, True)]
        transfers += [Transfer(c, (after,), size, True), Transfer(d, (after,), size, True)]
        if after + 1 < 5 * count:
            transfers.append(Transfer(after, (after + 1,), size, True))
    atoms = 5 * count
    seconds = tuple(dice.lognormvariate(0, 1) for _ in range(atoms))
    saved = tuple(dice.randrange(9) for _ in range(atoms))
    link = tuple(tuple(0.05 * (a != b) for b in range(stages)) for a in range(stages))
    limit = 1.5 * sum(saved)
    machine = StageDevices(
        (1.0, 2.0) * (stages // 2), (limit,) * stages, tuple(range(stages, 0, -1)), link
    )
    return Work(seconds, (1,) * atoms, saved, tuple(transfers)), machine


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_networks_of_blocks_are_divided_over_links_and_within_limits(stages: int) -> None:
    """No stage is much slower than if all work were divided evenly, and nothing sent."""
    for seed in range(3):
        work, machine = blocks(30, stages, random.Random(seed))
        found = Partitioner().divide(work, machine)
        assert found is not None
        assert found.fits(machine)
        assert found.slowest <= 1.2 * work.total / sum(machine.speeds)


def block_partition(seconds: Sequence[float], stages: int) -> float:
    """The slowest block of the best partition of a sequence into blocks: by its recurrence."""
    sums = [0.0, *itertools.accumulate(seconds)]
    best = [0.0, *[math.inf] * len(seconds)]
    for _ in range(stages):
        best = [
            min((max(best[i], sums[j] - sums[i]) for i in range(j)), default=math.inf)
            for j in range(len(sums))
        ]
    return best[-1]


@given(st.lists(st.floats(0.01, 10), min_size=4, max_size=30), st.integers(2, 4))
def test_a_chain_is_cut_as_in_its_best_blocks_but_for_what_measurements_differ_by(
    seconds: list[float], stages: int
) -> None:
    found = Partitioner().divide(chain(seconds), StageDevices.equal(stages))
    assert found is not None
    assert found.slowest <= block_partition(seconds, stages) * (1 + SLACK) * (1 + 1e-9)


@given(
    st.lists(
        st.tuples(st.sampled_from([1.0, 1.001, 2.0]), st.integers(0, 5)), min_size=3, max_size=12
    ),
    st.integers(2, 3),
)
def test_of_cuts_as_good_the_one_that_sends_least_is_taken(
    atoms: list[tuple[float, int]], stages: int
) -> None:
    work = chain([seconds for seconds, _ in atoms], [size for _, size in atoms])
    machine = StageDevices.equal(stages)
    found = Partitioner().divide(work, machine)
    assert found is not None
    cap = block_partition(work.seconds, stages) * (1 + SLACK)
    least = min(
        crossing
        for seconds, crossing in (weighed(work, machine, c) for c in legal_runs(len(work), stages))
        if max(seconds) <= cap * (1 - 1e-9) or max(seconds) == block_partition(work.seconds, stages)
    )
    assert found.crossing <= least


def legal_runs(length: int, stages: int) -> Iterator[list[int]]:
    for cuts in itertools.combinations(range(1, length), stages - 1):
        yield [sum(i >= cut for cut in cuts) for i in range(length)]


def test_a_slow_link_is_avoided() -> None:
    """The two stages could be equal; the value there is large, and the link takes longer."""
    work = chain([1.0] * 6, [1, 1, 100, 1, 1])
    link = ((0.0, 0.1), (0.1, 0.0))
    found = Partitioner().divide(work, StageDevices((1.0, 1.0), per_byte=link))
    free = Partitioner().divide(work, StageDevices.equal(2))
    assert found is not None
    assert free is not None
    assert free.crossing == 100
    assert found.crossing == 1
    assert found.slowest == pytest.approx(4.2)  # 4 s, 1 byte there and 1 back


def test_memory_limits_move_a_cut() -> None:
    work = Work((1.0,) * 4, (10, 10, 1, 1), (1,) * 4, chain([1.0] * 4).transfers)
    found = Partitioner().divide(work, StageDevices((1.0, 1.0), (13.0, math.inf), (2, 1)))
    assert found is not None
    assert found.stage_of == (0, 1, 1, 1)
    assert found.loads[0].memory == 12  # its parameters, and two micro-batches
    assert found.loads[1].memory == 12 + 3 + 1


def test_the_least_limits_that_would_do_are_found() -> None:
    work = Work((1.0,) * 4, (8, 4, 4, 8), (0,) * 4, chain([1.0] * 4, [0] * 3).transfers)
    machine = StageDevices((1.0, 1.0), (2.0, 2.0), (1, 1))
    assert Partitioner().divide(work, machine) is None
    assert max(load.memory for load in Partitioner().nearest(work, machine).loads) == 12


ATOMS = 10_000 if DEEP else 2_000


def wide(atoms: int, kind: str) -> Work:
    """A large graph: one chain with skips, four towers, or edges at random."""
    dice = random.Random(7)
    seconds = tuple(dice.lognormvariate(0, 1.5) for _ in range(atoms))
    transfers = []
    for atom in range(1, atoms):
        near = {"chain": atom - 1, "towers": max(atom - 4, 0)}
        source = near.get(kind, dice.randrange(max(0, atom - 20), atom))
        transfers.append(Transfer(source, (atom,), dice.randrange(1000), True))
        if atom % 17 == 0:
            skipped = dice.randrange(max(0, atom - 60), atom)
            transfers.append(Transfer(skipped, (atom,), dice.randrange(1000), True))
    return Work(seconds, (1,) * atoms, (1000,) * atoms, tuple(transfers))


@pytest.mark.parametrize("kind", ["chain", "towers", "random"])
def test_many_atoms_are_divided_evenly(kind: str) -> None:
    work = wide(ATOMS, kind)
    found = Partitioner().divide(work, StageDevices.equal(8))
    assert found is not None
    assert found.slowest <= 1.02 * work.total / 8


@pytest.mark.parametrize("kind", ["chain", "towers", "random"])
def test_many_atoms_are_divided_within_limits(kind: str) -> None:
    """By even work the first stages, which keep the most micro-batches, would exceed them."""
    work, peaks = wide(ATOMS, kind), tuple(range(8, 0, -1))
    machine = StageDevices((1.0,) * 8, (750.0 * ATOMS,) * 8, peaks)
    found = Partitioner().divide(work, machine)
    assert found is not None and found.fits(machine)
    assert found.slowest <= 1.1 * work.total / 8


def test_what_is_reserved_is_left_free() -> None:
    work = Work((1.0,) * 4, (5,) * 4, (0,) * 4, tuple(Transfer(i, (i + 1,), 0) for i in range(3)))
    machine = StageDevices((1.0, 1.0), (13.0, math.inf), (1, 1), reserved=(4, 0))
    found = Partitioner().divide(work, machine)
    assert found is not None
    assert found.stage_of == (0, 1, 1, 1)
    assert [load.memory for load in found.loads] == [9, 15]
