"""What a memory limit leaves for the next cut where more was predicted than was counted."""

from __future__ import annotations

import pytest

import fxpipe
from fxpipe.extensions.memory_limits.budget import MemoryBudget
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import F
from fxpipe.passes.partition.work import StageDevices, StageLoad


def loads(*memory: float) -> list[StageLoad]:
    return [StageLoad(memory=each) for each in memory]


def placed(*placement: int) -> Schedule:
    """A schedule of one forward for each stage, on these devices."""
    tasks = [[F(0, s) for s, home in enumerate(placement) if home == d] for d in {*placement}]
    return Schedule("forwards", 1, placement, tuple(map(tuple, tasks)))


def test_what_was_predicted_beyond_the_count_is_left_free_by_the_next_cut() -> None:
    machine = StageDevices((1.0,) * 3, (50.0, 100.0, 50.0), (1,) * 3, names=("a", "b", "a"))
    budget = MemoryBudget(placed(0, 1, 0), machine)
    assert not budget.kept
    assert budget.machine.reserved == (0, 0, 0)
    # device 0 is counted to hold 80 and predicted to hold 111, device 1 30 and 25
    assert not budget.keeps(loads(50, 30, 30), [111, 25])
    assert budget.machine.reserved == (16, 0, 16)  # 31 for its two stages, rounded up
    # the cut after it leaves that free: 60 + 32 are counted, and 90 are held
    assert budget.keeps(loads(46, 40, 46), [90, 40])
    assert budget.kept


def test_a_cut_that_never_keeps_its_limits_is_refused_in_the_end() -> None:
    budget = MemoryBudget(placed(0), StageDevices((1.0,), (100.0,), (1,), names=("cpu",)))
    with pytest.raises(fxpipe.PartitionError, match="cpu is predicted to hold 101 B in a step"):
        for _ in range(100):
            assert not budget.keeps(loads(90), [101])


def test_a_cut_that_only_its_count_forbids_is_predicted_once() -> None:
    """The count may be too high; where the prediction is over the limit too, it was not."""
    machine = StageDevices((1.0,), (100.0,), (1,), names=("cpu",))
    budget = MemoryBudget(placed(0), machine)
    assert budget.nearest
    assert not budget.keeps(loads(130), [120])
    assert not budget.nearest
    assert budget.machine.reserved == (-10,)  # what was counted was 10 too much
    assert MemoryBudget(placed(0), machine).keeps(loads(130), [95])
