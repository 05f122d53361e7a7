"""The pass runner verifies before and after each pass, and names the one that broke something."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from fxpipe.errors import PassError, VerificationError
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower
from fxpipe.passes.runner import run
from fxpipe.schedules import gpipe
from tests.helpers.plans import chain


def test_passes_run_one_after_another() -> None:
    program = run(gpipe(2, 2), Lower(chain(2)), communicate, free)
    assert program.passes == ("lower", "communicate", "free")


def test_without_a_pass_the_value_is_returned() -> None:
    schedule = gpipe(2, 2)
    assert run(schedule) is schedule


def test_what_the_first_pass_is_handed_is_verified() -> None:
    wrong = replace(gpipe(2, 2), microbatches=3)
    with pytest.raises(
        PassError, match=r"^pass 'lower' was handed an invalid schedule: "
    ) as caught:
        run(wrong, Lower(chain(2)))
    assert isinstance(caught.value.__cause__, VerificationError)
    assert "stage 0 has no forward of micro-batch 2" in str(caught.value)


def test_the_pass_that_makes_something_invalid_is_named() -> None:
    def lose_a_device(program: Program) -> Program:
        return replace(program, lists=(program.lists[0], ()))

    with pytest.raises(PassError, match=r"^pass 'lose_a_device' made an invalid program") as caught:
        run(gpipe(2, 2), Lower(chain(2)), lose_a_device, communicate)
    assert isinstance(caught.value.__cause__, VerificationError)
    assert len(caught.value.__cause__.faults) > 1


def test_a_pass_that_makes_something_else_is_named() -> None:
    class Nothing:
        name: ClassVar[str] = "nothing"

        def __call__(self, schedule: Schedule) -> None:
            return None

    with pytest.raises(PassError, match="pass 'nothing' made None, which is not a plan"):
        run(gpipe(1, 1), Nothing())  # type: ignore[type-var]


def test_each_pass_is_told_with_its_seconds() -> None:
    told: list[tuple[str, float]] = []
    run(
        gpipe(2, 2),
        Lower(chain(2)),
        communicate,
        on_pass=lambda name, seconds: told.append((name, seconds)),
    )
    assert [name for name, _ in told] == ["lower", "communicate"]
    assert all(0 <= seconds < 10 for _, seconds in told)


def test_the_folder_is_not_imported_under_its_bare_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    monkeypatch.delitem(sys.modules, "passes", raising=False)
    with pytest.raises(ImportError, match=r"import this package as fxpipe\.passes"):
        importlib.import_module("passes")
