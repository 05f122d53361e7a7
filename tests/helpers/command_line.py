"""The command line, run in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxpipe.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit status, what was printed and what was complained of."""
    status = main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err
