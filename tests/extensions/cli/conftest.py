"""The text of a schedule with faults, for the tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import fxpipe

PLAIN = fxpipe.Recipe("plain", lambda d, p, m: [fxpipe.F(0), fxpipe.B(0), fxpipe.U()])(2, 2)


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    path = tmp_path / "faulty.txt"
    path.write_text(str(PLAIN))
    return path
