"""Finds the schedule, plan or program that a name or path on the command line means, and reads
times."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import fxpipe.schedules as _library
from fxpipe.errors import FxpipeError, InputError, near, told
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import RECIPES, Recipe, find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.text.peers import looks_like_actions, looks_like_nodes
from fxpipe.torchtools.source import of_exception
from fxpipe.verify.peers import Actions

DEVICES, MICROBATCHES = 4, 8
"""The numbers of devices and micro-batches for a schedule that works with any."""

T = TypeVar("T")

_COST = re.compile(r"(?P<letter>\w)(?:@(?P<stage>[0-9]{1,9}))?=(?P<time>\S+)")
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


def read_costs(
    text: str | None, option: str = "--costs"
) -> dict[str | tuple[str, int], float] | None:
    """``F=1,B@3=2.5`` → the time of each kind of task, for all stages or for one.

    Raises:
        InputError: the text is not written like that.
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
                f"{option} has {item.strip()!r}; write a kind of task and its time, such as F=1, "
                "or of one stage alone, F@3=1.5"
            ) from None
        letter, stage = match["letter"], match["stage"]
        costs[letter if stage is None else (letter, int(stage))] = time
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
    if (named in RECIPES and not path.exists()) or _PYTHON.fullmatch(named):
        return read_schedule(named, devices, microbatches)[0]
    text = _text(path)
    if _is_csv(path, text):
        return _parsed(named, partial(Actions.parse, name=path.stem), text)
    lines = (line.split("#")[0].split() for line in text.splitlines())
    first = next((words[0] for words in lines if words), "nothing")
    if first == "schedule" or looks_like_nodes(text):
        return _asked(named, _of_text(named, text), devices, microbatches)[0]
    if first == "plan":
        return _parsed(named, Plan.parse, text)
    if first == "program":
        return _parsed(named, Program.parse, text)
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
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; name a text file") from error


def _parsed(named: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except FxpipeError as error:
        raise InputError(f"{named}: {error}") from error


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
