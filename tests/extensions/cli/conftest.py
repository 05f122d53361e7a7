"""A file of a user's own schedules, for the tests of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fxpipe.ir.recipe import RECIPES

OWN = """
import fxpipe
from fxpipe import B, F, U


@fxpipe.schedule("own-gpipe")
def mine(device, devices, microbatches):
    yield from map(F, range(microbatches))
    yield from map(B, range(microbatches))
    yield U()


def plain(device, devices, microbatches):
    yield F(0)
    yield B(0)
    yield U()


ready = mine(2, 3)
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    yield path
    RECIPES.pop("own-gpipe", None)
