"""Reads command-line arguments: names and paths of schedules and programs, and costs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fxpipe.errors import FxpipeError, InputError
from fxpipe.extensions.cli.python_file import is_python, of_python
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import PARTIAL, RECIPES, Recipe, find_recipe
from fxpipe.ir.schedule import Schedule

DEVICES, MICROBATCHES = 4, 8
"""The default numbers of devices and micro-batches of a schedule that works with any."""

T = TypeVar("T")

_COST = re.compile(
    r"(?P<letter>\w(?:&\w)?)(?:(?P<microbatch>[0-9]{1,9})?@(?P<stage>[0-9]{1,9}))?=(?P<time>\S+)"
)


def named_schedule(named: str, devices: int | None, microbatches: int | None) -> Schedule:
    """Return the schedule that a name or path means.

    Raises:
        InputError: there is no such schedule, its text does not parse, or it is for other numbers.
    """
    return _sized(named, _find(named), devices, microbatches)


def read_costs(text: str | None) -> dict[Any, float] | None:
    """Parse ``F=1,B@3=2.5,F0@3=4``: the time of a kind of task, of those on stage 3, and of
    micro-batch 0 there.

    Raises:
        InputError: the text has another form, or gives the same time twice.
    """
    if text is None:
        return None
    costs: dict[Any, float] = {}
    for item in text.split(","):
        match = _COST.fullmatch(item.strip())
        try:
            assert match is not None
            time = float(match["time"])
        except (AssertionError, ValueError):
            raise InputError(
                f"--costs has {item.strip()!r:.99}; write a kind of task and its time, such as "
                "F=1, or of one stage alone, F@3=1.5, or of micro-batch 0 there, F0@3=2"
            ) from None
        letter, *at = match.group("letter", "stage", "microbatch")
        key = (letter, *map(int, filter(None, at))) if any(at) else letter
        if key in costs:
            raise InputError(f"--costs has {item.strip()!r} after another time of it; give one")
        costs[key] = time
    return costs


def _sized(
    named: str, source: Schedule | Recipe, devices: int | None, microbatches: int | None
) -> Schedule:
    """Check that a schedule has the wanted numbers, or make one of these numbers from a recipe."""
    if isinstance(source, Schedule):
        for word, wanted, number in (
            ("devices", devices, source.devices),
            ("microbatches", microbatches, source.microbatches),
        ):
            if wanted not in (None, number):
                raise InputError(f"{named} is for {number} {word} and not {wanted}; leave that out")
        return source
    return source(
        DEVICES if devices is None else devices,
        MICROBATCHES if microbatches is None else microbatches,
    )


def read_file(named: str, devices: int | None, microbatches: int | None) -> Schedule | Program:
    """Read a schedule or program from a file, or a schedule by its name.

    Raises:
        InputError: as for ``named_schedule``, or the text is none of these.
    """
    path = Path(named)
    if (named in (*PARTIAL, *RECIPES) and not path.exists()) or is_python(named):
        return named_schedule(named, devices, microbatches)
    text = _text(path)
    lines = (line.split("#")[0].split() for line in text.splitlines())
    first = next((words[0] for words in lines if words), "")
    if first == "schedule":
        return _sized(named, _parsed(named, Schedule.parse, text), devices, microbatches)
    if first == "program":
        return _parsed(named, Program.parse, text)
    what = f"begins with {first!r}" if first else "is empty"
    raise InputError(f"{named} {what}; give a text that begins with 'schedule' or 'program'")


def _find(named: str) -> Schedule | Recipe:
    if named in (*PARTIAL, *RECIPES):
        return find_recipe(named)
    if is_python(named):
        return of_python(named)
    path = Path(named)
    if path.exists() or path.suffix or path.name != named or named == "-":
        return _parsed(named, Schedule.parse, _text(path))
    return find_recipe(named)


def _text(path: Path) -> str:
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise InputError("nothing is piped in; name a text file")
            return sys.stdin.read().removeprefix("\ufeff")
        return path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; name a text file") from error


def _parsed(named: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except FxpipeError as error:
        raise InputError(f"{named}: {error}") from error
