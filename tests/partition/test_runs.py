"""Cutting a sequence into runs, compared with all there are, by costs that are written down once
more; and graphs with many branches, and slow links."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.passes.partition.runs import Goal, Runs
from fxpipe.passes.partition.solve import Partitioner
from fxpipe.passes.partition.work import StageDevices, Transfer, Work, weigh
from tests.helpers.works import MANY, chain, machines, works
from tests.oracles.every_division import fits


def as_runs(
    work: Work, machine: StageDevices, cuts: Sequence[int]
) -> tuple[list[float], int] | None:
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


def cells(count: int, dice: random.Random) -> Work:
    """Cells of five branches of three atoms that meet, each of the results of the two before,
    as found by architecture search."""
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


@pytest.mark.parametrize("work", [cells(6, random.Random(0)), chain([1.0] * 80)])
def test_links_slower_than_all_compute_leave_a_division(work: Work) -> None:
    link = ((1e4,) * 4,) * 4
    found = Partitioner().divide(work, StageDevices((1.0,) * 4, per_byte=link))
    assert found is not None
    assert found.slowest >= 2e4


def test_a_search_finds_the_fastest_link_to_any_stage() -> None:
    """From the first stage to the last is fast, by way of the second slow; nothing takes it."""
    work = Work((1.0,) * 3, (0,) * 3, (0,) * 3, (Transfer(0, (2,), 1),))
    link = ((0.0, 10.0, 0.1), (10.0, 0.0, 10.0), (0.1, 10.0, 0.0))
    found = Partitioner().divide(work, StageDevices((1.0,) * 3, per_byte=link))
    assert found is not None
    assert found.stage_of == (0, 1, 2)
    assert found.slowest == pytest.approx(1.1)


def test_a_shared_parameter_weighs_on_the_stage_that_owns_it() -> None:
    tied = Transfer(None, (0, 1), 0, True, 10)
    work = Work((1.0, 1.0), (0, 0), (0, 0), (Transfer(0, (1,), 0), tied))
    for limits, fits_ in (((9.0, 99.0), False), ((10.0, 0.0), True)):
        found = Partitioner().divide(work, StageDevices((1.0, 1.0), limits, (1, 1)))
        assert (found is not None) == fits_


def test_a_value_is_sent_once_to_each_stage_that_reads_it() -> None:
    work = Work((1.0,) * 4, (0,) * 4, (0,) * 4, (Transfer(0, (0, 1, 2, 3), 10, returns=True),))
    link = tuple(tuple(0.0 if a == b else 0.01 for b in range(3)) for a in range(3))
    division = weigh(work, StageDevices((1.0,) * 3, per_byte=link), (0, 1, 1, 2))
    assert division.crossing == 20
    assert [load.received for load in division.loads] == [0, 10, 10]
    assert [load.transfer for load in division.loads] == pytest.approx([0.4, 0.2, 0.2])
