"""The layers of the library: what each may import, when it is loaded or inside its functions.

The representations alone reach up, in the methods that are named here, such as ``plan.verify()``;
what draws, simulates and counts them is found by ``fxpipe/extend.py``. Imports
for type checking alone are free.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

from fxpipe.ir.recipe import RECIPES

ROOT = Path(__file__).parent.parent

LAYERS = {
    "ground": (
        "fxpipe.errors",
        "fxpipe.extend",
        "fxpipe.log",
        "fxpipe.parts",
        "fxpipe.random",
        "fxpipe.signals",
        "fxpipe.torchtools",
        "fxpipe.formatting",
        "fxpipe.views",
    ),
    "representations": ("fxpipe.ir", "fxpipe.kernels"),
    "text": ("fxpipe.text",),
    "verify": ("fxpipe.verify",),
    "schedules": ("fxpipe.schedules",),
    "passes": ("fxpipe.passes",),
    "runtime": ("fxpipe.runtime",),
    "compiler": ("fxpipe.compiler",),
    "face": (
        "fxpipe",
        "fxpipe.__main__",
        "fxpipe.arguments",
        "fxpipe.calls",
        "fxpipe.devices",
        "fxpipe.engine",
        "fxpipe.entry",
        "fxpipe.module",
        "fxpipe.pipeline",
        "fxpipe.signature",
        "fxpipe.locks",
    ),
    "extensions": ("fxpipe.extensions",),
}
"""Layer → its modules; a package stands for all that is in it, save for ``fxpipe`` itself."""

BASE = ("ground", "representations")
MAY_IMPORT = {
    "ground": (),
    "representations": ("ground",),
    "text": BASE,
    "verify": (*BASE, "text"),
    "schedules": ("representations",),
    "passes": (*BASE, "text", "verify"),
    "runtime": (*BASE, "text", "verify"),
    "compiler": tuple(layer for layer in LAYERS if layer not in ("face", "extensions")),
    "face": tuple(layer for layer in LAYERS if layer != "extensions"),
    "extensions": tuple(LAYERS),
}
"""Layer → the other layers that it may import."""

TABLES = ("fxpipe", "fxpipe.parts", "fxpipe.views")
"""The modules that say for type checkers what extensions have."""


REACH_UP = {
    "fxpipe.ir.plan": {"__str__", "text", "verify"},
    "fxpipe.ir.program": {"__str__", "parse", "verify", "window"},
    "fxpipe.ir.schedule": {"__str__", "parse", "verify"},
    "fxpipe.ir.traced": {"__str__", "text"},
}
"""Module → its methods that may import from any layer when they are called."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.glob("fxpipe/**/*.py"))} | {
    f"fxpipe.{module_name(path)}": path
    for folder in ("passes", "schedules")
    for path in sorted(ROOT.glob(f"{folder}/**/*.py"))
}
"""Every module of the library; the glob does not follow the links to the two outer folders."""


def layer_of(module: str) -> str | None:
    for layer, members in LAYERS.items():
        for member in members:
            inside = member != "fxpipe" and module.startswith(f"{member}.")
            if module == member or inside:
                return layer
    return None


def imported(node: ast.AST, free: Collection[str] = ()) -> Iterator[str]:
    """The modules that this code imports, but for what functions of these names do."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(package), names=names):
            inner = (f"{package}.{alias.name}" for alias in names)
            yield from (name if name in SOURCES else package for name in inner)
        case ast.FunctionDef(name=name) if name in free:
            pass
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
            for statement in orelse:
                yield from imported(statement, free)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from imported(child, free)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(module: str) -> list[str]:
    return list(dict.fromkeys(imported(parsed(SOURCES[module]), REACH_UP.get(module, ()))))


def test_every_module_has_a_layer() -> None:
    lost = [module for module in SOURCES if layer_of(module) is None]
    assert not lost, f"add these to LAYERS in {Path(__file__).name}: {lost}"


def test_every_module_of_the_core_is_tested_by_its_name() -> None:
    """A test file has its name, or imports it; packages are what is in them."""
    files = [*(ROOT / "tests").rglob("*.py")]
    named = {path.name for path in files}
    texts = "\n".join(path.read_text() for path in files)
    taken: dict[str, str] = {}  # package → what some test imports from it
    for package, names in re.findall(r"from ([\w.]+) import ([^\n]*)", texts):
        taken[package] = f"{taken.get(package, '')} {names}"
    lacking = []
    for module, path in SOURCES.items():
        package, _, name = module.rpartition(".")
        if layer_of(module) == "extensions" or path.name in ("__init__.py", "__main__.py"):
            continue
        if not (
            f"test_{name}.py" in named
            or re.search(rf"\b{name}\b", taken.get(package, ""))
            or re.search(rf"\b{re.escape(module)}\b", texts)
        ):
            lacking.append(module)
    assert lacking == []


def test_imports_go_down_the_layers() -> None:
    upward = [
        f"{module} ({layer}) may import {sorted(allowed)}, not {name}"
        for module in SOURCES
        if (layer := layer_of(module)) and (allowed := {layer, *MAY_IMPORT[layer]})
        for name in imports_of(module)
        if name.partition(".")[0] == "fxpipe" and layer_of(name) not in allowed
    ]
    assert not upward


WRITTEN = {
    *(name for name in SOURCES if layer_of(name) == "schedules"),
    *(recipe.tasks.__module__ for recipe in RECIPES.values()),
}
"""The modules that have schedules."""


@pytest.mark.parametrize("module", sorted(WRITTEN))
def test_a_schedule_knows_only_its_representation(module: str) -> None:
    """No torch, no library: a schedule can be read and run anywhere."""
    others = [
        name
        for name in imports_of(module)
        if name.removeprefix("fxpipe.ir.") not in ("listed", "recipe", "schedule", "task")
        and not name.startswith("fxpipe.schedules.")
        and name not in WRITTEN
        and name != "fxpipe.extensions.list_schedules.listed"
        and name.partition(".")[0] not in sys.stdlib_module_names
    ]
    assert not others


def test_the_core_names_no_class_of_an_extension_for_types_either() -> None:
    """Else type checkers miss an extension that is deleted, but for the tables."""
    named = [
        (module, node.module)
        for module, path in SOURCES.items()
        if not module.startswith("fxpipe.extensions") and module not in TABLES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fxpipe.extensions")
    ]
    assert not named


def test_a_module_is_imported_by_its_only_name() -> None:
    bare = [
        (module, name)
        for module in SOURCES
        for name in imports_of(module)
        if name.partition(".")[0] in ("passes", "schedules")
    ]
    assert not bare


TWICE = {
    "add_reduce": "the pass, and the extension's function that it finds",
    "Offload": "the extension, and the instruction that it adds",
}
"""Public names that two modules define, and why."""


def test_a_public_name_is_defined_once() -> None:
    defined = Counter(
        node.name
        for path in SOURCES.values()
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    )
    assert {name for name, count in defined.items() if count > 1} == set(TWICE)


def test_imports_are_absolute() -> None:
    outer = [
        path
        for folder in ("tests", "examples", "benchmarks")
        for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    relative = [
        (path, line)
        for path in (*SOURCES.values(), *outer)
        for line in re.findall(r"^\s*from\s+\..*", path.read_text(), re.MULTILINE)
    ]
    assert not relative


def extensions_of(tree: ast.AST) -> set[str]:
    """The extensions that a test imports, or whose tests it does, or whose methods it calls."""
    names = [name.split(".") for name in imported(tree)]
    found = {name[2] for name in names if name[1:2] == ["extensions"] and len(name) > 2}
    found -= {"attributes", "constants", "draws", "sums", "tables"}  # which extensions share
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("simulate", "profile"):
            if ast.unparse(node) != "torch.profiler.profile":
                found.add("simulator")
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "pipe.reset_parameters":
            found.add("initial_values")  # modules of torch have a method of that name, too
    return found


def test_no_test_of_the_core_imports_an_extension() -> None:
    """So that an extension can be deleted with its tests. A test that needs one stands with it, or
    asks for it by the name that a user gives."""
    tests = ROOT / "tests"
    paths = [path.relative_to(tests) for path in sorted(tests.glob("**/*.py"))]
    found = {
        path.as_posix(): extensions_of(parsed(tests / path))
        for path in paths
        if path.parts[0] != "extensions"
    }
    for path, used in found.items():
        if path.startswith("simcuda/"):
            used.discard("streams")  # without which there is no simulated device
    assert not {path: used for path, used in found.items() if used}


def test_what_a_test_uses_of_extensions_is_found_inside_functions_too() -> None:
    source = """
import torch.profiler
def test():
    from fxpipe.extensions.offload import add_offload
    from tests.extensions.draw.test_picture import shown
    torch.profiler.profile
    return pipe.simulate()
"""
    assert extensions_of(ast.parse(source)) == {"draw", "offload", "simulator"}


ORACLES = sorted((ROOT / "tests" / "oracles").glob("*.py"))
SHARED = {
    "every_division": ["fxpipe.passes.partition.work"],
    "stream_machine": ["fxpipe.runtime.interpreter"],
}
"""Oracle → what it needs besides the representations; its page says why."""


@pytest.mark.parametrize("path", ORACLES, ids=lambda path: path.stem)
def test_an_oracle_shares_only_data_with_what_it_judges(path: Path) -> None:
    shared = [
        name
        for name in imported(parsed(path))
        if name.partition(".")[0] == "fxpipe"
        and layer_of(name) != "representations"
        and name not in SHARED.get(path.stem, [])
    ]
    assert not shared
    helped = [name for name in imported(parsed(path)) if ".helpers." in name]
    assert not helped


def test_the_page_of_oracles_tells_of_each_and_of_files_that_are_there() -> None:
    page = (ROOT / "tests" / "oracles" / "README.md").read_text()
    assert sorted(re.findall(r"\*\*`(\w+)\.py`\*\*", page)) == [path.stem for path in ORACLES]
    named = [name for name in re.findall(r"`([\w/]+(?:\.py)?)`", page) if "/" in name]
    assert [name for name in named if not (ROOT / name).exists() and not gone(name)] == []


def gone(name: str) -> bool:
    """Whether this is a test of an extension that has been deleted."""
    folder = name.removeprefix("tests/").split("/")[:2]
    return folder[0] == "extensions" and not (ROOT / "fxpipe" / "/".join(folder)).is_dir()


@pytest.mark.parametrize(
    ("module", "method"),
    [(module, method) for module in REACH_UP for method in sorted(REACH_UP[module])],
)
def test_what_reaches_up_is_a_method_that_does(module: str, method: str) -> None:
    functions = [
        node
        for node in ast.walk(parsed(SOURCES[module]))
        if isinstance(node, ast.FunctionDef) and node.name == method
    ]
    allowed = {layer_of(module), *MAY_IMPORT[layer_of(module) or ""]}
    assert any(
        name.startswith("fxpipe.") and layer_of(name) not in allowed
        for function in functions
        for name in imported(function)
    )


def test_imports_inside_functions_count_and_those_for_types_do_not() -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import a
else:
    import b
try:
    import c
finally:
    pass
class Class:
    import d
    def method(self):
        import e
    def draw(self):
        import f
def function():
    if True:
        import g
"""
    assert list(imported(ast.parse(source), {"draw"})) == ["typing", "b", "c", "d", "e", "g"]
