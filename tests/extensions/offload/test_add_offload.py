"""Where a pass puts what stages store and fetch, and what that costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from fxpipe.errors import VerificationError
from fxpipe.extensions.offload.add_offload import add_offload
from fxpipe.extensions.simulator import Sizes
from fxpipe.extensions.streams.events import Streams
from fxpipe.ir.recipe import RECIPES
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS
from fxpipe.passes.schedule import add_recompute
from tests.helpers.plans import chain_program
from tests.helpers.profiles import some
from tests.schedules.test_pairs import pairings, runs

COUNTS = [(1, 4), (2, 5), (4, 4), (4, 8)]


@pytest.mark.smoke
@pytest.mark.parametrize("name", some(sorted(RECIPES.keys() - {"inference"})))
def test_no_backward_waits_and_no_device_holds_more(name: str) -> None:
    for devices, microbatches in COUNTS:
        schedule = RECIPES[name](devices, microbatches)
        stored = add_offload(schedule, "always").verify()
        sizes = Sizes(saved=dict.fromkeys(range(schedule.stages), 100))
        before, after = (each.simulate(sizes=sizes) for each in (schedule, stored))
        assert after.makespan <= before.makespan
        for one, other in zip(before.memory, after.memory, strict=True):
            assert other.peak <= max(one.peak, 0)
        if name == "gpipe" and microbatches > 4:
            assert [memory.peak for memory in after.memory] == [300] * devices
        Streams()(chain_program(stored).verify()).verify()


@pytest.mark.smoke
def test_a_prefetch_that_takes_long_comes_early(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = RECIPES["gpipe"](1, 6)
    rows = []
    for time in (0.5, 4):
        monkeypatch.setitem(KINDS, "P", replace(KINDS["P"], cost=time))
        stored = add_offload(schedule, "always")
        rows.append(" ".join(map(str, stored.rows[0])).replace("@0", ""))
    assert rows == [
        "F0 O0 F1 O1 F2 O2 F3 O3 F4 O4 P0 F5 O5 P1 B0 P2 B1 P3 B2 P4 B3 P5 B4 B5 U",
        "F0 O0 F1 O1 F2 O2 P0 F3 O3 P1 F4 O4 P2 F5 O5 P3 B0 P4 B1 B2 P5 B3 B4 B5 U",
    ]


@pytest.mark.smoke
def test_what_has_offloads_is_left_alone() -> None:
    schedule = RECIPES["gpipe"](2, 4)
    stored = add_offload(schedule, {1: "except_last"})
    assert add_offload(stored, "always") is stored
    assert {task.stage for row in stored.rows for task in row if task.kind == "O"} == {1}
    assert max(t.microbatch or 0 for row in stored.rows for t in row if t.kind == "O") < 3


@pytest.mark.smoke
def test_with_a_recompute_a_prefetch_comes_before_it() -> None:
    again = add_recompute(RECIPES["gpipe"](1, 5), "except_last")
    row = " ".join(map(str, add_offload(again, "always").verify().rows[0])).replace("@0", "")
    assert row == "F0 O0 F1 O1 F2 O2 F3 O3 P0 F4 O4 R0 P1 B0 R1 P2 B1 R2 P3 B2 R3 P4 B3 B4 U"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("F0 P0 F1 B0 B1 U", "P0@0: it fetches what is never stored"),
        ("F0 O0 F1 B0 B1 U", "O0@0: it is never fetched"),
        ("F0 O0 F1 B0 P0 B1 U", "B0@0: it comes before P0@0"),
        ("F0 F1 B0 O0 P0 B1 U", "B0@0: it comes before P0@0"),
        ("F0 P0 O0 F1 B0 B1 U", "P0@0: it comes before O0@0"),
        ("O0 F0 P0 F1 B0 B1 U", "O0@0: it comes before F0@0"),
        ("F0 O0 F1 O0 P0 B0 B1 U", "O0@0: it is there already"),
        ("F0 O0 F1 R0 P0 B0 B1 U", "R0@0: it comes before P0@0"),
        ("F0 R0 O0 F1 P0 B0 B1 U", "R0@0: it comes before P0@0"),
    ],
)
def test_what_is_wrong_is_told_by_name(row: str, fault: str) -> None:
    text = f"schedule wrong stages=1 microbatches=2 delay=0\nplace 0\n0: {row}\n"
    with pytest.raises(VerificationError) as caught:
        Schedule.parse(text).verify()
    assert [fault in str(each) for each in caught.value.faults].count(True) == 1


@pytest.mark.smoke
@given(pairings())
def test_offloading_leaves_pairs_whole(schedule: Schedule) -> None:
    if runs(schedule):
        kept = add_recompute(schedule, "always")
        for stored in (add_offload(schedule, "always"), add_offload(kept, "except_last")):
            assert stored.verify().paired == schedule.paired
