"""Runs a process with a time limit, after which it and all of its children are killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def limited(command: Sequence[str], seconds: float, **options: Any) -> tuple[int | None, str]:
    """Run a command in the repository's root.

    Args:
        command: the program and its arguments.
        seconds: after which it is killed.
        options: for ``subprocess.Popen``.

    Returns:
        Its exit status, or None where it was killed; and its output, where ``stdout`` is a pipe.
    """
    with subprocess.Popen(
        command, cwd=ROOT, text=True, start_new_session=True, **options
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
            return process.returncode, output or ""
        except subprocess.TimeoutExpired:
            _kill(process)
            output, _ = process.communicate()
            return None, output or ""
        except BaseException:
            _kill(process)
            raise


def _kill(process: subprocess.Popen[str]) -> None:
    """It leads a group of its own, in which what it has started is too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
