"""The partitioner that is there without any extension."""

from __future__ import annotations

import itertools
import random

import pytest

from fxpipe.passes.partition.work import Partitioner, StageDevices, Work, weigh


def drawn(atoms: int, seed: int) -> Work:
    draw = random.Random(seed)
    seconds = tuple(draw.choice((0.0, 1.0, draw.uniform(0, 5))) for _ in range(atoms))
    return Work(seconds, tuple(draw.randrange(9) for _ in seconds), (1,) * atoms)


@pytest.mark.parametrize("seed", range(40))
def test_the_slowest_stage_is_that_of_the_best_cut_in_order(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(1, 4)
    work = drawn(draw.randint(stages, 9), seed)
    machine = StageDevices(tuple(draw.choice((1.0, 2.0)) for _ in range(stages)))
    slowest = []
    for cuts in itertools.combinations(range(1, len(work)), stages - 1):
        stage_of = [sum(atom >= cut for cut in cuts) for atom in range(len(work))]
        slowest.append(weigh(work, machine, stage_of).slowest)
    found = Partitioner().divide(work, machine)
    assert found is not None
    assert found.slowest == pytest.approx(min(slowest))
    assert sorted(found.stage_of) == list(found.stage_of)
    assert {*found.stage_of} == {*range(stages)}


def test_a_cut_that_does_not_fit_is_none() -> None:
    work = Work((1.0,) * 4, (10, 1, 1, 1), (0,) * 4)
    assert Partitioner().divide(work, StageDevices((1.0, 1.0), limits=(11.0, 2.0))) is not None
    assert Partitioner().divide(work, StageDevices((1.0, 1.0), limits=(10.0, 3.0))) is None
