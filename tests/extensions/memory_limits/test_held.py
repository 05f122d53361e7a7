"""How many micro-batches stages hold at once, against counts by hand."""

from __future__ import annotations

import pytest

from fxpipe.extensions.memory_limits.budget import MemoryBudget
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.partition.work import StageDevices
from fxpipe.passes.schedule import add_recompute
from fxpipe.text.schedule import parse_schedule


def counted(schedule: Schedule) -> StageDevices:
    """The devices of two stages, with the micro-batches that a schedule lets them hold."""
    return MemoryBudget(schedule, StageDevices((1.0, 1.0), (100.0, 100.0))).machine


def test_a_schedule_that_holds_more_needs_more_memory() -> None:
    """GPipe keeps all four micro-batches on both stages, 1F1B two and one."""
    assert counted(find_recipe("gpipe")(2, 4)).peaks == (4, 4)
    assert counted(find_recipe("1f1b")(2, 4)).peaks == (2, 1)


def test_batches_that_overlap_are_counted_together() -> None:
    rows = "0: U'' F0 F1 B0' B1'\n1: U'' F0 F1 B0' B1'\n"
    text = f"schedule overlapping stages=2 microbatches=2 delay=1\nplace 0 | 1\n{rows}"
    assert counted(parse_schedule(text)).peaks == (4, 4)


def test_what_is_recomputed_is_saved_for_one_micro_batch() -> None:
    plain = find_recipe("gpipe")(2, 4)
    again = counted(add_recompute(plain, ["always", "never"]))
    assert again.peaks == (1, 4)
    assert again.arrived == counted(plain).peaks == (4, 4)
    partly = counted(
        parse_schedule(
            "schedule mine stages=2 microbatches=3 delay=0\nplace 0 | 1\n"
            "0: F0 F1 F2 B2 R1 B1 R0 B0 U\n1: F0 F1 F2 B2 B1 B0 U\n"
        )
    )
    assert (partly.peaks, partly.arrived) == ((1, 3), (3, 3))


def test_what_is_stored_elsewhere_is_held_for_three_micro_batches() -> None:
    """One is fetched while one is stored and one computed."""
    offload = pytest.importorskip("fxpipe.extensions.offload.add_offload")
    again = add_recompute(find_recipe("gpipe")(2, 6), ["always", "never"])
    assert (counted(again).peaks, counted(again).arrived) == ((1, 6), (6, 6))
    stored = counted(offload.add_offload(again, "always"))
    assert (stored.peaks, stored.arrived) == ((1, 3), (3, 3))
    some = counted(offload.add_offload(again, "except_last"))
    assert (some.peaks, some.arrived) == ((1, 4), (4, 4))
