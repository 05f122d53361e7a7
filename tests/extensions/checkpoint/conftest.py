"""A checkpoint that many tests read, written once a file of tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.checkpoints import write_one


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_one(tmp_path_factory.mktemp("written") / "run")


@pytest.fixture
def trained(tmp_path: Path, written: Path) -> Path:
    """A copy of it."""
    shutil.copy(written, tmp_path / "run")
    return tmp_path / "run"
