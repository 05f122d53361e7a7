"""Programs that store and fetch are refused by name, or compute the step."""

from __future__ import annotations

import pytest

from fxpipe.extensions.offload.add_offload import add_offload
from fxpipe.passes.schedule import add_recompute
from fxpipe.schedules import gpipe, two_bw, zb_h1
from tests.verify.test_program import (
    OF_OFFLOAD,
    Case,
    assert_edits_are_judged,
    assert_returned_as_they_are,
    edits_of,
)

CASES: dict[str, Case] = {
    "offload": (add_offload(gpipe(2, 4), "always"), True, False),
    "offload, halves": (add_offload(zb_h1(3, 5), "except_last"), True, False),
    "offload, overlap": (add_offload(two_bw(3, 3), {0: "always"}), True, False),
    "offload, recompute": (
        add_offload(add_recompute(gpipe(2, 4), "except_last"), "always"),
        True,
        False,
    ),
    "offload, recompute, overlap": (
        add_offload(add_recompute(two_bw(3, 3), "always"), "always"),
        True,
        False,
    ),
    "offload, pause": (add_offload(gpipe(2, 4), "always"), False, True),
}
"""Name → schedule, whether it is lowered with updates, and with a pause."""


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_single_edits_are_refused_when_they_change_what_is_computed(case: str) -> None:
    assert_edits_are_judged(case, CASES)


@pytest.mark.deep
def test_no_class_of_edits_is_left_out() -> None:
    count = edits_of(CASES)
    edits = "drop", "duplicate", "swap", "move", "give away"
    changes = "change micro-batch", "change batch", "change value", "change opcode"
    wanted = {(edit, kind) for edit in (*edits, *changes) for kind in OF_OFFLOAD}
    assert not {each for each in wanted if count[each] < 2}


@pytest.mark.smoke
def test_a_valid_program_is_returned_as_it_is() -> None:
    assert_returned_as_they_are(CASES)
