"""The pass runner verifies before and after each pass, and names the one that broke something."""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fxpipe.errors import PassError, VerificationError
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.passes.runner import Pass, run_all
from fxpipe.schedules import gpipe
from tests.helpers.plans import chain, run


def doubled(x: int) -> int:
    return 2 * x


def added(x: int, y: int) -> tuple[int, int]:
    return x + y, x


def test_a_list_of_passes_hands_on_what_each_requires_and_provides() -> None:
    passes = (
        Pass(doubled, "x", "x"),
        Pass(doubled, "x", "x", when="more"),
        Pass(doubled, "x", "x", when="not more"),
        Pass(added, "x, y", "y, x"),
    )
    assert run_all(passes, {"x": 1, "y": 5, "more": True}) == {"x": 4, "y": 9, "more": True}


def test_the_fields_of_a_pass_come_from_the_facts() -> None:
    passes = (
        Pass(Lower, "schedule, plan, pause", "program"),
        Pass(communicate, "program", "program"),
        Pass(free, "program", "program"),
    )
    facts = {"schedule": gpipe(2, 2), "plan": chain(2), "pause": True}
    program = run_all(passes, facts)["program"]
    assert program == run(gpipe(2, 2), Lower(chain(2), pause=True), communicate, free)


def test_a_pass_in_the_wrong_place_is_refused_by_name() -> None:
    passes = Pass(added, "x, y", "x, z"), Pass(doubled, "x", "y")
    with pytest.raises(PassError, match="requires 'y', which nothing made"):
        run_all(passes, {"x": 1})


def test_what_a_pass_of_a_list_makes_is_verified() -> None:
    def lose_a_device(program: Program) -> Program:
        return replace(program, lists=(program.lists[0], ()))

    passes = (
        Pass(Lower, "schedule, plan", "program"),
        Pass(lose_a_device, "program", "program"),
        Pass(communicate, "program", "program"),
    )
    with pytest.raises(PassError, match=r"^pass 'lose_a_device' made an invalid program") as caught:
        run_all(passes, {"schedule": gpipe(2, 2), "plan": chain(2)})
    assert isinstance(caught.value.__cause__, VerificationError)


def test_what_a_pass_leaves_as_it_was_is_not_verified_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def left(schedule: Schedule) -> Schedule:
        return schedule

    def renamed(schedule: Schedule) -> Schedule:
        return replace(schedule, name="other")

    passes = (Pass(left, "schedule", "schedule"), Pass(renamed, "schedule", "schedule"))
    with caplog.at_level(logging.DEBUG, "fxpipe"):
        run_all(passes, {"schedule": gpipe(2, 2)})
    told = [record.__dict__["fxpipe_pass"] for record in caplog.records]
    assert told == ["left", "renamed", "verify schedule"]


def test_the_folder_is_not_imported_under_its_bare_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    monkeypatch.delitem(sys.modules, "passes", raising=False)
    with pytest.raises(ImportError, match=r"import this package as fxpipe\.passes"):
        importlib.import_module("passes")
