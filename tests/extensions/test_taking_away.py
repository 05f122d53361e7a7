"""Extensions can be taken away, all and each, and the core loads none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DELETED, REGISTERED, lacks

ROOT = Path(__file__).parents[2]

IN_FOLDERS = {
    folder.parent.name: f"fxpipe.extensions.{folder.parent.name}"
    for folder in sorted((ROOT / "fxpipe" / "extensions").glob("*/__init__.py"))
}


def errors_without(*modules: str) -> list[str]:
    """Why the rest does not work without each of these modules; empty if it does."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.extensions.taking_away"),
            *(f"{number}={names}" for number, names in enumerate(modules)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, str] = json.loads(done.stdout)
    return [*told.values()]


def test_without_any_extension_the_rest_works_and_with_all_it_loads_none() -> None:
    assert errors_without(",".join(IN_FOLDERS.values()), "none") == ["", ""]


@pytest.mark.deep
def test_without_one_extension_the_rest_works_and_loads_no_other() -> None:
    told = zip(IN_FOLDERS, errors_without(*IN_FOLDERS.values()), strict=True)
    assert {name: error for name, error in told if error} == {}


@pytest.mark.deep
def test_a_folder_of_the_core_that_is_taken_away_is_missed() -> None:
    assert "No module named 'fxpipe.text" in errors_without("fxpipe.text")[0]


def test_what_needs_a_deleted_extension_is_skipped_and_nothing_else() -> None:
    assert {*IN_FOLDERS} | DELETED == REGISTERED
    for text in (
        "draw() needs the extension fxpipe.extensions.draw, which is not there",
        "ModuleNotFoundError: No module named 'tests.extensions.draw'",
        "No such file or directory: 'fxpipe/extensions/draw/plan.py'",
    ):
        assert lacks(text, {"draw"}) == "needs the extension draw"
        assert lacks(text, {"search"}) is None
    assert lacks("fxpipe.extensions.lost is not there") is None  # the registry does not know it
