"""Finds the schedule, plan or program that a name or path on the command line means, and reads
times."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import fxpipe.schedules as _library
from fxpipe.errors import FxpipeError, InputError
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import RECIPES, Recipe, find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.python_file import is_python, of_python
from fxpipe.text.peers import looks_like_actions, looks_like_nodes
from fxpipe.verify.peers import Actions

DEVICES, MICROBATCHES = 4, 8
"""The numbers of devices and micro-batches for a schedule that works with any."""

T = TypeVar("T")

_COST = re.compile(r"(?P<letter>\w)(?:@(?P<stage>[0-9]{1,9}))?=(?P<time>\S+)")


def read_schedule(
    named: str, devices: int | None, microbatches: int | None
) -> tuple[Schedule, Recipe | None]:
    """The schedule that ``SCHEDULE`` means, and its recipe if it works with any numbers.

    Raises:
        InputError: there is no such schedule, or it is for other numbers.
        ParseError: a text is no schedule.
    """
    return _asked(named, _find(named), devices, microbatches)


def read_costs(
    text: str | None, option: str = "--costs"
) -> dict[str | tuple[str, int], float] | None:
    """``F=1,B@3=2.5`` → the time of each kind of task, for all stages or for one.

    Raises:
        InputError: the text is not written like that, or gives two times of the same.
    """
    if text is None:
        return None
    costs: dict[str | tuple[str, int], float] = {}
    for item in text.split(","):
        match = _COST.fullmatch(item.strip())
        try:
            assert match is not None
            time = float(match["time"])
        except (AssertionError, ValueError):
            raise InputError(
                f"{option} has {item.strip()!r:.99}; write a kind of task and its time, such as "
                "F=1, or of one stage alone, F@3=1.5"
            ) from None
        letter, stage = match["letter"], match["stage"]
        key = letter if stage is None else (letter, int(stage))
        if key in costs:
            raise InputError(f"{option} has {item.strip()!r} after another time of it; give one")
        costs[key] = time
    return costs


def _asked(
    named: str, found: Schedule | Recipe, devices: int | None, microbatches: int | None
) -> tuple[Schedule, Recipe | None]:
    if isinstance(found, Schedule):
        for word, asked, own in (
            ("devices", devices, found.devices),
            ("microbatches", microbatches, found.microbatches),
        ):
            if asked not in (None, own):
                raise InputError(f"{named} is for {own} {word} and not {asked}; leave that out")
        return found, None
    schedule = found(
        DEVICES if devices is None else devices,
        MICROBATCHES if microbatches is None else microbatches,
    )
    return schedule, found


def read_file(
    named: str, devices: int | None, microbatches: int | None
) -> Schedule | Plan | Program | Actions:
    """Read a text, whose first word says what it is, or the schedule in a Python file.

    A CSV of another library's actions is read as it is, for the faults that it would have there.

    Raises:
        InputError, ParseError: as for ``read_schedule``.
    """
    path = Path(named)
    if (named in RECIPES and not path.exists()) or is_python(named):
        return read_schedule(named, devices, microbatches)[0]
    text = _text(path)
    if _is_csv(path, text):
        return _parsed(named, partial(Actions.parse, name=path.stem), text)
    lines = (line.split("#")[0].split() for line in text.splitlines())
    first = next((words[0] for words in lines if words), "")
    if first == "schedule" or looks_like_nodes(text):
        return _asked(named, _of_text(named, text), devices, microbatches)[0]
    if first == "plan":
        return _parsed(named, Plan.parse, text)
    if first == "program":
        return _parsed(named, Program.parse, text)
    what = f"begins with {first!r}" if first else "is empty"
    raise InputError(
        f"{named} {what}; give a text that begins with 'schedule', 'plan' or 'program', or a CSV"
    )


def _find(named: str) -> Schedule | Recipe:
    assert _library  # importing it has registered the library's schedules
    if named in RECIPES:
        return RECIPES[named]
    if is_python(named):
        return of_python(named)
    path = Path(named)
    if path.exists() or path.suffix or path.name != named or named == "-":
        return _of_text(named, _text(path))
    return find_recipe(named)


def _of_text(named: str, text: str) -> Schedule:
    """A schedule in any of its forms, also those of other libraries."""
    path = Path(named)
    if _is_csv(path, text):
        return _parsed(named, partial(Schedule.from_csv, name=path.stem, check=False), text)
    if looks_like_nodes(text):
        return _parsed(named, partial(Schedule.from_nodes, name=path.stem), text)
    return _parsed(named, Schedule.parse, text)


def _is_csv(path: Path, text: str) -> bool:
    return path.suffix == ".csv" or looks_like_actions(text)


def _text(path: Path) -> str:
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise InputError("nothing is piped in; name a text file")
            return sys.stdin.read().removeprefix("\ufeff")
        return path.read_text(encoding="utf-8-sig")  # spreadsheets begin a file with a mark
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; name a text file") from error


def _parsed(named: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except FxpipeError as error:
        raise InputError(f"{named}: {error}") from error
