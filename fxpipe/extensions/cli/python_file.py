"""Loads schedules from Python files, ``path/to/file.py:name``."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

from fxpipe.errors import InputError, near, told
from fxpipe.ir.recipe import RECIPES, Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.torchtools.source import of_exception

_PYTHON = re.compile(r"(?P<path>.*\.py)(?::(?P<name>[^:/]+))?")


def is_python(named: str) -> bool:
    """Whether the text has the form ``path/to/file.py`` or ``path/to/file.py:name``."""
    return _PYTHON.fullmatch(named) is not None


def of_python(named: str) -> Schedule | Recipe:
    """Run a Python file and return its schedule of the given name, or its only one.

    Raises:
        InputError: there is no such file or schedule, or the file cannot be run.
    """
    match = _PYTHON.fullmatch(named)
    assert match is not None
    path, name = Path(match["path"]), match["name"]
    before = dict(RECIPES)
    try:
        module = _load(path)
    except InputError:
        RECIPES.clear()
        RECIPES.update(before)
        raise
    registered = {key: recipe for key, recipe in RECIPES.items() if before.get(key) is not recipe}
    variables = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, Schedule | Recipe) and value not in before.values()
    }
    if name is None:
        candidates = registered or variables
        if len(candidates) != 1:
            shown = ", ".join(sorted(candidates)) or "none"
            raise InputError(f"{path} holds these schedules: {shown}; name one, as in {path}:name")
        return next(iter(candidates.values()))
    if name in registered:
        return registered[name]
    value = getattr(module, name, None)
    if isinstance(value, Schedule | Recipe):
        return value
    if callable(value):
        return Recipe(name, value)
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
    similar = near(name, {*variables, *registered, *functions})
    raise InputError(f"{path} has no schedule {name!r}: {similar}")


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
