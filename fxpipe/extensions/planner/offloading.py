"""Stages that offload, if the extension for that is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxpipe.compiler.options import Options
from fxpipe.extend import Extension, find, there
from fxpipe.extensions.planner.candidates import Modes
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.schedule import modes_of


def possible() -> bool:
    """Whether the extension is there."""
    return there("extension", "offload")


def offload_of(options: Options) -> Any:
    """The extension that a pipe was given, or None."""
    kind = find("extension", "offload") if possible() else ()
    return next((each for each in options.extensions if isinstance(each, kind)), None)


def modes_given(options: Options, stages: int) -> Modes:
    """Stage → the mode that a pipe was given."""
    asked = offload_of(options)
    return modes_of(asked.modes if asked else "never", stages)


def with_modes(extensions: Sequence[Extension], modes: Modes) -> tuple[Extension, ...]:
    """The extensions of a pipe whose stages have these modes; unchanged if there are none."""
    if not set(modes) - {"never"}:
        return tuple(extensions)
    kind = find("extension", "offload")
    return (*(each for each in extensions if not isinstance(each, kind)), kind(modes))


def offloading(schedule: Schedule, modes: Modes) -> Schedule:
    """A schedule whose stages have these modes, if any."""
    made: Schedule = (
        find("extension", "offload")(modes).add_offload(schedule) if modes else schedule
    )
    return made
