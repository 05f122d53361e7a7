"""Each extension can be taken away, and the core loads none; every folder there is tried."""

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


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """Extension that was taken away → why the rest does not work, or ""; and the same without a
    folder of the core, and without anything."""
    taken = {**IN_FOLDERS, "nothing": "none", "text": "fxpipe.text"}
    given = [f"{name}={modules}" for name, modules in taken.items()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.extensions.taking_away", *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, str] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("name", [*IN_FOLDERS, "nothing"])
def test_without_an_extension_the_rest_works_and_loads_no_other(
    errors: dict[str, str], name: str
) -> None:
    assert errors[name] == ""


def test_a_folder_of_the_core_that_is_taken_away_is_missed(errors: dict[str, str]) -> None:
    assert "No module named 'fxpipe.text" in errors["text"]
