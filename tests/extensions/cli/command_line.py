"""The command line, run in this process."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from fxpipe.extensions import tables
from fxpipe.extensions.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit status, what was printed and what was complained of."""
    with patch.object(tables, "_told", set()):  # a command is a process
        status = main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err
