"""``make compat``: a row for each version, whatever becomes of it; pytest is played by scripts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compat

HERE = ".".join(map(str, sys.version_info[:2]))
PASSED = "....\n4 passed, 1 skipped in 0.10s"
FAILED = "FAILED tests/a.py::test_b[c] - assert 1 == 2\n2 failed, 3 passed, 1 error in 0.10s"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text("")
    return tmp_path


def environment(root: Path, torch: str, says: str, status: int) -> None:
    """One that is ready, in which pytest says something and ends."""
    folder = root / f".venv-{torch}"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    answer = f"echo {torch}.7 3.99.1; exit 0"
    python.write_text(f"#!/bin/sh\n[ $1 = -c ] && {{ {answer}; }}\necho '{says}'\nexit {status}\n")
    python.chmod(0o755)
    (folder / "ready").touch()


def run(root: Path, versions: list[tuple[str, str]]) -> tuple[int, list[list[Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "VERSIONS", versions)
        status = compat.main(["-x"], root, root)
    (path,) = root.glob("compat-*.json")
    return status, json.loads(path.read_text())["grids"][0]["rows"]


def test_a_row_has_the_exact_versions_and_the_outcomes(root: Path) -> None:
    environment(root, "2.1", PASSED, 0)
    assert run(root, [("2.1", HERE)]) == (0, [["2.1.7", "3.99.1", "4", "0", "1", ""]])


def test_a_failed_suite_is_named_and_the_next_one_runs(root: Path) -> None:
    environment(root, "2.1", FAILED, 1)
    environment(root, "2.2", PASSED, 0)
    status, rows = run(root, [("2.1", HERE), ("2.2", HERE)])
    assert status == 1
    assert rows[0][2:] == ["3", "3", "0", "tests/a.py::test_b[c]"]
    assert rows[1][2:] == ["4", "0", "1", ""]


def test_a_suite_that_does_not_end_by_itself_fails(root: Path) -> None:
    environment(root, "2.1", "no tests ran", 5)
    status, rows = run(root, [("2.1", HERE)])
    assert status == 1 and rows[0][-1] == "pytest ended with 5"


def test_a_python_that_is_missing_is_named_and_no_failure(root: Path) -> None:
    environment(root, "2.2", PASSED, 0)
    status, rows = run(root, [("2.1", "3.0"), ("2.2", HERE)])
    assert status == 0
    assert rows[0] == ["2.1", "3.0", "–", "–", "–", "python3.0 was not found"]
    assert rows[1][2] == "4"


def test_an_environment_that_cannot_be_made_fails_and_the_next_one_runs(root: Path) -> None:
    environment(root, "2.1", PASSED, 0)
    os.utime(root / ".venv-2.1" / "ready", (0, 0))  # the project has changed since
    broken = root / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    environment(root, "2.2", PASSED, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "interpreter", lambda version: str(broken))
        status, rows = run(root, [("2.1", HERE), ("2.2", HERE)])
    assert status == 1
    assert "exit status 3" in rows[0][-1] and rows[1][2] == "4"
