"""Finds the schedule, plan or program that a name or path on the command line means."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import fxpipe.schedules as _library
from fxpipe.errors import FxpipeError, InputError, near, told
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import RECIPES, Recipe, find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.torchtools.source import of_exception

DEVICES, MICROBATCHES = 4, 8
"""The numbers of devices and micro-batches for a schedule that works with any."""

T = TypeVar("T", Schedule, Plan, Program)

_PYTHON = re.compile(r"(?P<path>.*\.py)(?::(?P<name>[^:/]+))?")


def read_schedule(
    named: str, devices: int | None, microbatches: int | None
) -> tuple[Schedule, Recipe | None]:
    """The schedule that ``SCHEDULE`` means, and its recipe if it works with any numbers.

    Raises:
        InputError: there is no such schedule, or it is for other numbers.
        ParseError: a text is no schedule.
    """
    return _asked(named, _find(named), devices, microbatches)


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
) -> Schedule | Plan | Program:
    """Read a text, whose first word says what it is, or the schedule in a Python file.

    Raises:
        InputError, ParseError: as for ``read_schedule``.
    """
    path = Path(named)
    if (named in RECIPES and not path.exists()) or _PYTHON.fullmatch(named):
        return read_schedule(named, devices, microbatches)[0]
    text = _text(path)
    lines = (line.split("#")[0].split() for line in text.splitlines())
    first = next((words[0] for words in lines if words), "nothing")
    match first:
        case "schedule":
            return _asked(named, _parsed(named, Schedule, text), devices, microbatches)[0]
        case "plan":
            return _parsed(named, Plan, text)
        case "program":
            return _parsed(named, Program, text)
    raise InputError(
        f"{named} begins with {first!r}; the text of a schedule, a plan or a program begins with "
        "that word"
    )


def _find(named: str) -> Schedule | Recipe:
    assert _library  # importing it has registered the library's schedules
    if named in RECIPES:
        return RECIPES[named]
    if match := _PYTHON.fullmatch(named):
        return _of_module(Path(match["path"]), match["name"])
    path = Path(named)
    if path.exists() or path.suffix or path.name != named or named == "-":
        return _parsed(named, Schedule, _text(path))
    return find_recipe(named)


def _text(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; name a text file") from error


def _parsed(named: str, kind: type[T], text: str) -> T:
    try:
        parsed: T = kind.parse(text)
    except FxpipeError as error:
        raise InputError(f"{named}: {error}") from error
    return parsed


def _of_module(path: Path, name: str | None) -> Schedule | Recipe:
    """The schedule of a Python file that has this name, or its only one."""
    before = dict(RECIPES)
    module = _load(path)
    made = {key: recipe for key, recipe in RECIPES.items() if before.get(key) is not recipe}
    own = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, Schedule | Recipe) and value not in before.values()
    }
    if name is None:
        candidates = made or own
        if len(candidates) != 1:
            shown = ", ".join(sorted(candidates)) or "none"
            raise InputError(f"{path} holds these schedules: {shown}; name one, as in {path}:name")
        return next(iter(candidates.values()))
    if name in made:
        return made[name]
    found = getattr(module, name, None)
    if isinstance(found, Schedule | Recipe):
        return found
    if callable(found):
        return Recipe(name, found)
    raise InputError(f"{path} has no schedule {name!r}: {near(name, [*own, *made])}")


def _load(path: Path) -> ModuleType:
    """Run a Python file as a module of its own."""
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    name = f"fxpipe_file_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        where = "" if isinstance(error, SyntaxError) else f" ({of_exception(error)})"
        raise InputError(f"{path} cannot be run: {told(error)}{where}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module
