"""How many micro-batches stages hold at once, against counts by hand."""

from __future__ import annotations

import pytest

from fxpipe.extensions.memory_limits.budget import MemoryBudget
from fxpipe.extensions.memory_limits.held import arrival_peaks, stash_peaks
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import B, F, U
from fxpipe.passes.partition.work import StageDevices
from fxpipe.passes.schedule import add_recompute
from fxpipe.text.schedule import parse_schedule


def test_a_schedule_that_holds_more_needs_more_memory() -> None:
    """GPipe keeps all four micro-batches on both stages, 1F1B two and one."""
    machine = StageDevices((1.0, 1.0), (100.0, 100.0))
    assert MemoryBudget(find_recipe("gpipe")(2, 4), machine).machine.peaks == (4, 4)
    assert MemoryBudget(find_recipe("1f1b")(2, 4), machine).machine.peaks == (2, 1)


def test_batches_that_overlap_are_counted_together() -> None:
    rows = ((F(0, 0), F(1, 0), B(0, 0, batch=-1), B(1, 0, batch=-1), U(0)),)
    assert stash_peaks(Schedule("overlapping", 2, (0,), rows)) == (4,)


def test_what_is_recomputed_is_saved_for_one_micro_batch() -> None:
    plain = find_recipe("gpipe")(2, 4)
    again = add_recompute(plain, ["always", "never"])
    assert stash_peaks(again) == (1, 4)
    assert arrival_peaks(again) == stash_peaks(plain) == (4, 4)
    partly = parse_schedule(
        "schedule mine stages=1 microbatches=3 delay=0\nplace 0\n0: F0 F1 F2 B2 R1 B1 R0 B0 U\n"
    )
    assert stash_peaks(partly) == (1,)
    assert arrival_peaks(partly) == (3,)


def test_what_is_stored_elsewhere_is_held_for_three_micro_batches() -> None:
    """One is fetched while one is stored and one computed."""
    offload = pytest.importorskip("fxpipe.extensions.offload.add_offload")
    again = add_recompute(find_recipe("gpipe")(2, 6), ["always", "never"])
    assert (stash_peaks(again), arrival_peaks(again)) == ((1, 6), (6, 6))
    stored = offload.add_offload(again, "always")
    assert (stash_peaks(stored), arrival_peaks(stored)) == ((1, 3), (3, 3))
