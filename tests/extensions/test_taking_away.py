"""Extensions can be taken away, all and each, and the core loads none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

IN_FOLDERS = {
    folder.parent.name: f"fxpipe.extensions.{folder.parent.name}"
    for folder in sorted((ROOT / "fxpipe" / "extensions").glob("*/__init__.py"))
}


def error_without(modules: str) -> str:
    """Why the rest does not work without these modules; empty if it does."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.extensions.taking_away", f"it={modules}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, str] = json.loads(done.stdout)
    return told["it"]


@pytest.mark.parametrize(
    "modules",
    [
        ",".join(IN_FOLDERS.values()),
        *(pytest.param(module, marks=pytest.mark.deep) for module in IN_FOLDERS.values()),
        "none",
    ],
    ids=["all", *IN_FOLDERS, "nothing"],
)
def test_without_extensions_the_rest_works_and_loads_no_other(modules: str) -> None:
    assert error_without(modules) == ""


@pytest.mark.deep
def test_a_folder_of_the_core_that_is_taken_away_is_missed() -> None:
    assert "No module named 'fxpipe.text" in error_without("fxpipe.text")
