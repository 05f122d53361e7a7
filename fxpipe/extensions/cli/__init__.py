"""The command line: look at schedules, and check schedules and programs."""

from __future__ import annotations

from fxpipe.extensions.cli.commands import main

__all__ = ["main"]
