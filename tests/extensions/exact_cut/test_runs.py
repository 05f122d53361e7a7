"""What dividing work is made of: runs of a sequence, contracted graphs, values sent several times.

Each is compared with all there is on small graphs, by costs that are written down once more.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.extensions.exact_cut.bound import chain_bound, lower_bound, sent_apart
from fxpipe.extensions.exact_cut.downsets import contractions, downsets, pack
from fxpipe.extensions.exact_cut.lattice import Lattice
from fxpipe.extensions.exact_cut.runs import Goal, Runs
from fxpipe.extensions.exact_cut.solve import SLACK, solve
from fxpipe.passes.partition.work import Machine, Transfer, Work, weigh
from tests.helpers.works import MANY, chain, machines, works
from tests.oracles.every_division import fits, legal, weighed


def as_runs(work: Work, machine: Machine, cuts: Sequence[int]) -> tuple[list[float], int] | None:
    """Seconds of each run, and bytes that arrive at any, where every run keeps its limit.

    What arrives comes from the stage before, and what leaves goes to the next one, once.
    """
    ends = [0, *cuts, len(work)]
    stage_of = [stage for stage in range(machine.stages) for _ in range(*ends[stage : stage + 2])]
    if not fits(work, machine, stage_of):
        return None
    seconds, arriving = [], 0
    for stage, (begin, end) in enumerate(itertools.pairwise(ends)):
        took = math.fsum(work.seconds[begin:end]) / machine.speeds[stage]
        for value in work.transfers:
            born = min(value.readers) if value.source is None else value.source
            read = any(begin <= reader < end for reader in value.readers)
            if born < begin and read:
                took += machine.transfer_seconds(stage - 1, stage, value)
                arriving += value.bytes
            elif begin <= born < end and any(reader >= end for reader in value.readers):
                took += machine.transfer_seconds(stage, stage + 1, value)
        seconds.append(took)
    return seconds, arriving


@MANY
@pytest.mark.parametrize("goal", ["seconds", "bytes"])
@given(st.data(), works(9), st.integers(1, 4), st.sampled_from([1.0, 1.2, 3.0, math.inf]))
def test_a_sequence_is_cut_into_the_best_runs(
    goal: Goal, data: st.DataObject, work: Work, stages: int, room: float
) -> None:
    machine = data.draw(machines(stages))
    found = {
        cuts: cost
        for cuts in itertools.combinations(range(1, len(work)), stages - 1)
        if (cost := as_runs(work, machine, cuts)) is not None
    }
    best = min((max(seconds) for seconds, _ in found.values()), default=0.0)
    cap = best * room if best else room
    allowed = {
        cuts: cost
        for cuts, cost in found.items()
        if max(cost[0]) <= cap * (1 + 1e-12) or cap == math.inf
    }
    cuts = Runs(work, machine, range(len(work))).cut(goal, cap)
    if not allowed:
        assert cuts is None
        return
    assert cuts is not None
    seconds, arriving = allowed[tuple(cuts)]
    if goal == "seconds":
        assert max(seconds) == pytest.approx(best)
        return
    least = min(other for _, other in allowed.values())
    assert arriving == least
    if 0 < cap < math.inf:
        # of equal bytes the better balanced
        even = min(sum(s * s for s in s_) for s_, other in allowed.values() if other == least)
        assert sum(s * s for s in seconds) == pytest.approx(even, rel=1e-6, abs=1e-9)


@given(st.data(), works(9), st.integers(1, 3))
def test_a_division_of_a_contracted_graph_costs_the_same_in_the_graph_itself(
    data: st.DataObject, work: Work, stages: int
) -> None:
    machine = data.draw(machines(stages))
    for coarse, atom_of in contractions(work):
        assert len(coarse) < len(work)
        assert sorted(set(atom_of)) == list(range(len(coarse)))
        for value in coarse.transfers:
            assert value.source is None or value.source < min(value.readers)
        for assigned in itertools.islice(legal(coarse, stages), 20):
            expanded = tuple(assigned[atom] for atom in atom_of)
            assert all(
                expanded[source] <= expanded[atom]
                for atom, sources in enumerate(work.before)
                for source in sources
            )
            ours, theirs = (weigh(w, machine, s) for w, s in ((coarse, assigned), (work, expanded)))
            for own, other in zip(ours.loads, theirs.loads, strict=True):
                assert own.seconds == pytest.approx(other.seconds)
                assert (own.memory, own.received) == (other.memory, other.received)


def test_light_atoms_merge_first_and_no_cycle_is_closed() -> None:
    """a → b → c, a → d → c: a may merge with what reads nothing else, never past its branches."""
    work = Work(
        (1.0, 1.0, 9.0, 1.0),
        (0,) * 4,
        (0,) * 4,
        (Transfer(0, (1, 3), 1), Transfer(1, (2,), 1), Transfer(3, (2,), 1)),
    )
    graphs = [len(coarse) for coarse, _ in contractions(work)]
    assert graphs == sorted(graphs, reverse=True)
    coarse, atom_of = next(iter(contractions(work)))
    assert atom_of[0] in (atom_of[1], atom_of[3])
    assert atom_of.count(atom_of[2]) == 1  # the heavy one waits
    assert sorted(coarse.seconds)[-1] == 9


@MANY
@given(st.data(), works(), st.integers(1, 3))
def test_values_that_are_sent_apart_cost_what_they_did(
    data: st.DataObject, work: Work, stages: int
) -> None:
    machine = data.draw(machines(stages))
    cap = data.draw(st.sampled_from([1.0, 3.0, 6.0, 10.0]))
    apart = sent_apart(work, machine, cap)
    assert apart.before == work.before
    for assigned in legal(work, stages):
        seconds, crossing = weighed(work, machine, assigned)
        if max(seconds) <= cap:
            again = weighed(apart, machine, assigned)
            assert again[0] == pytest.approx(seconds)
            assert again[1] == crossing
            assert fits(apart, machine, assigned) == fits(work, machine, assigned)


def test_a_skip_over_more_than_a_stage_takes_is_two_values() -> None:
    """x is read next to it and behind 20 s of work; with 21 s and more one stage may hold both."""
    work = Work(
        (1.0, 0.5, 20.0, 0.5),
        (0,) * 4,
        (0,) * 4,
        (Transfer(0, (1, 3), 5, True), Transfer(1, (2,), 1), Transfer(2, (3,), 1)),
    )
    machine = Machine((0.5, 1.0))
    apart = sent_apart(work, machine, 20.9).transfers
    assert apart[:2] == (Transfer(0, (1,), 5, True), Transfer(0, (3,), 5, True))
    assert sent_apart(work, machine, 21.1).transfers == work.transfers
    assert sent_apart(work, Machine((2.0, 1.0)), 20.9).transfers == work.transfers


def cells(count: int, dice: random.Random) -> Work:
    """Cells of five branches of three atoms that meet, each of the results of the two before: as
    found by architecture search, with more downsets than can be listed."""
    seconds, transfers = [1.0, 1.0], [Transfer(0, (1,), 4, True)]
    results = [0, 1]
    for _ in range(count):
        first = len(seconds)
        ends = []
        readers: dict[int, list[int]] = {results[-2]: [], results[-1]: []}
        for branch in range(5):
            atom = first + 3 * branch
            readers[results[-1 - branch % 2]].append(atom)
            transfers += [Transfer(atom + i, (atom + i + 1,), 2, True) for i in range(2)]
            ends.append(atom + 2)
            seconds += [dice.lognormvariate(0, 1) for _ in range(3)]
        joined = len(seconds)
        seconds.append(dice.lognormvariate(0, 1))
        transfers += [Transfer(end, (joined,), 2, True) for end in ends]
        transfers += [Transfer(source, tuple(atoms), 4, True) for source, atoms in readers.items()]
        results.append(joined)
    none = (0,) * len(seconds)
    return Work(tuple(seconds), none, none, tuple(transfers))


@pytest.mark.parametrize(("stages", "fast"), [(4, 2.0), (8, 1.0), (8, 2.0)])
def test_wide_networks_of_cells_are_divided_with_a_proof(stages: int, fast: float) -> None:
    for seed in range(2):
        found = solve(cells(12, random.Random(seed)), Machine((1.0, fast) * (stages // 2)))
        assert found is not None
        assert found.gap <= SLACK


@pytest.mark.parametrize("work", [cells(6, random.Random(0)), chain([1.0] * 80)])
def test_links_slower_than_all_compute_leave_a_division(work: Work) -> None:
    link = ((1e4,) * 4,) * 4
    found = solve(work, Machine((1.0,) * 4, per_byte=link))
    assert found is not None
    assert found.division.slowest >= 2e4


def test_a_bound_minds_the_fastest_link_to_any_stage() -> None:
    """From the first stage to the last is fast, by way of the second slow; nothing takes it."""
    work = Work((1.0,) * 3, (0,) * 3, (0,) * 3, (Transfer(0, (2,), 1),))
    link = ((0.0, 10.0, 0.1), (10.0, 0.0, 10.0), (0.1, 10.0, 0.0))
    machine = Machine((1.0,) * 3, per_byte=link)
    found = solve(work, machine)
    assert found is not None
    assert found.division.stage_of == (0, 1, 2)
    assert found.division.slowest == found.bound == pytest.approx(1.1)
    sets = downsets(work, 10)
    assert sets is not None
    assert Lattice(work, machine, sets).best(1.2, fastest=True) is not None
    chained = replace(work, transfers=(*work.transfers, Transfer(0, (1,), 0), Transfer(1, (2,), 0)))
    assert chain_bound(chained, machine, 1.0, 1.2) == pytest.approx(1.1, rel=0.01)


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=3, max_size=7),
    st.lists(st.integers(0, 5), min_size=7, max_size=7),
    st.integers(2, 3),
)
def test_the_bound_by_a_chain_is_the_best_of_a_chain(
    seconds: list[float], sizes: list[int], stages: int
) -> None:
    """Over equal links, where a stage may stay empty."""
    work = chain(seconds, sizes[: len(seconds)])
    machine = Machine((1.0,) * stages, per_byte=((0.1,) * stages,) * stages)
    best = min(
        max(weighed(work, machine, assigned)[0])
        for assigned in itertools.product(range(stages), repeat=len(work))
        if list(assigned) == sorted(assigned)
    )
    low = lower_bound(work, machine)
    assert chain_bound(work, machine, low, best) >= best * 0.99
    assert chain_bound(work, machine, low, best) <= best * (1 + 1e-9)


def test_readers_of_which_each_may_sit_with_the_next_share_a_value() -> None:
    """a, b and c with 4 s between each two: a and c are apart in stages of 10 s, b is not."""
    seconds = (0.0, 1.0, 4.0, 1.0, 4.0, 1.0)
    links = tuple(Transfer(i, (i + 1,), 1) for i in range(1, 5))
    work = Work(seconds, (0,) * 6, (0,) * 6, (Transfer(0, (1, 3, 5), 5), *links))
    machine = Machine.equal(3)
    assert sent_apart(work, machine, 10.0).transfers == work.transfers
    assert [t.readers for t in sent_apart(work, machine, 5.0).transfers[:3]] == [(1,), (3,), (5,)]


def test_a_shared_parameter_weighs_on_the_stage_that_owns_it() -> None:
    tied = Transfer(None, (0, 1), 0, True, 10)
    work = Work((1.0, 1.0), (0, 0), (0, 0), (Transfer(0, (1,), 0), tied))
    for limits, fits_ in (((9.0, 99.0), False), ((10.0, 0.0), True)):
        machine = Machine((1.0, 1.0), limits, (1, 1))
        way = Lattice(work, machine, [0, 1, 3]).best(9.0, fastest=True)
        assert (way is not None) == fits_


@MANY
@given(st.data(), works(), st.integers(1, 3), st.sampled_from([1.0, 2.0, 3.0, 5.0, 9.0]))
def test_stages_are_packed_if_and_only_if_there_is_a_way(
    data: st.DataObject, work: Work, stages: int, limit: float
) -> None:
    speeds = data.draw(st.tuples(*[st.sampled_from([0.5, 1.0, 2.0])] * stages))
    machine = Machine(speeds)
    possible = any(
        all(assigned[s] <= assigned[a] for a, sources in enumerate(work.before) for s in sources)
        and max(weighed(work, machine, assigned)[0]) <= limit
        for assigned in itertools.product(range(stages), repeat=len(work))
    )
    packed = pack(work, machine, limit, 0.0)
    assert (packed is not None) == possible
    if packed is not None:
        assert max(weighed(work, machine, packed)[0]) <= limit * (1 + 1e-9)
