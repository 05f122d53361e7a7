"""What is installed is what stands in the folders, each module under one name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
OUTER = ("passes", "schedules")

LOOK = """
import importlib, json, os, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import fxpipe
bare = sorted(sys.modules)
fxpipe.compile
first = sorted(sys.modules)
if sys.argv[2:] == ["first"]:
    import torch
    torch.ones(2).numpy()
    print(json.dumps({"bare": bare, "first": first}))
    sys.exit()
import fxpipe.passes, fxpipe.schedules
from fxpipe.ir.recipe import RECIPES
for found in pkgutil.walk_packages(fxpipe.__path__, "fxpipe."):
    importlib.import_module(found.name)
print(json.dumps({
    "bare": bare,
    "first": first,
    "recipes": sorted(RECIPES),
    "files": {
        name: os.path.realpath(module.__file__)
        for name, module in sys.modules.items()
        if getattr(module, "__file__", None)
    },
}))
"""
"""Imports all of fxpipe from a folder; tells the modules that ``import fxpipe`` alone has loaded,
those with ``fxpipe.compile``, the schedules, and the file of every module. With "first", it tells
no more than the modules, and makes an array of numpy."""

SLOW = ("pygraphviz", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint")
"""What takes about as long to import as all of torch, and is not needed before a first step."""


def look(folder: Path, cwd: Path, *upto: str) -> dict[str, Any]:
    """What LOOK tells, in a fresh interpreter that knows nothing of this checkout."""
    done = python(*(("-W", "error") if upto else ()), "-c", LOOK, str(folder), *upto, cwd=cwd)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def python(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds nothing but the library, installed from its wheel."""
    folder = tmp_path_factory.mktemp("packaging")
    source, wheels, target = folder / "source", folder / "wheels", folder / "installed"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    leave = shutil.ignore_patterns("__pycache__")
    for name in ("fxpipe", *OUTER):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=leave)
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    for step in (
        ("wheel", "--no-index", "--no-build-isolation", "--no-deps", "-w", str(wheels), "."),
        (
            "install",
            "--no-index",
            "--no-deps",
            "--find-links",
            str(wheels),
            "--target",
            str(target),
            "fxpipe",
        ),
    ):
        done = python(*pip, *step, cwd=source)
        assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    """What LOOK tells of this checkout."""
    return look(ROOT, ROOT)


@pytest.fixture(scope="module")
def started() -> dict[str, Any]:
    """What LOOK tells of this checkout before it imports all, where a warning is an error."""
    return look(ROOT, ROOT, "first")


@pytest.fixture(scope="module")
def there(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What LOOK tells of the installed library."""
    return look(installed, tmp_path_factory.mktemp("elsewhere"))


@pytest.mark.deep
def test_a_wheel_installed_elsewhere_imports_and_lists_the_schedules(
    installed: Path, there: dict[str, Any]
) -> None:
    files = {name: Path(file) for name, file in there["files"].items() if name.startswith("fxpipe")}
    assert {"fxpipe", "fxpipe.passes", "fxpipe.schedules"} <= files.keys()
    assert [name for name, file in files.items() if not file.is_relative_to(installed)] == []
    assert {"1f1b", "gpipe"} <= set(there["recipes"])
    assert (installed / "fxpipe" / "py.typed").is_file()


@pytest.mark.deep
def test_a_wheel_holds_every_module_of_the_checkout(
    here: dict[str, Any], there: dict[str, Any]
) -> None:
    assert {name for name in here["files"] if name.startswith("fxpipe")} == {
        name for name in there["files"] if name.startswith("fxpipe")
    }
    assert here["recipes"] == there["recipes"]


@pytest.mark.deep
def test_no_module_is_imported_under_two_names(here: dict[str, Any]) -> None:
    names: dict[str, list[str]] = {}
    for name, file in here["files"].items():
        if Path(file).is_relative_to(ROOT / "fxpipe") or Path(file).parent.name in OUTER:
            names.setdefault(file, []).append(name)
    assert [twice for twice in names.values() if len(twice) > 1] == []


BARE = 60
"""The most modules of fxpipe that ``import fxpipe`` loads: the representations, the schedules and
what these read. It leaves room for one more instruction or family of schedules."""


def test_importing_fxpipe_loads_representations_and_schedules_alone(
    started: dict[str, Any],
) -> None:
    bare = [name for name in started["bare"] if name.partition(".")[0] == "fxpipe"]
    assert len(bare) <= BARE
    needless = ("compiler", "extensions", "kernels", "passes", "runtime", "text", "verify")
    assert [name for name in bare if name.startswith(tuple(f"fxpipe.{x}" for x in needless))] == []


def test_before_a_compile_no_extension_is_loaded(started: dict[str, Any]) -> None:
    assert "fxpipe.pipeline" in started["first"]
    assert [name for name in started["first"] if name.startswith("fxpipe.extensions.")] == []


def test_importing_fxpipe_does_not_import_what_a_first_step_needs(
    started: dict[str, Any],
) -> None:
    assert [name for name in SLOW if name in started["first"]] == []


def test_an_installation_has_numpy_which_torch_warns_about_and_folders_need(
    started: dict[str, Any],
) -> None:
    """torch does not require it: without it, ``import fxpipe`` would show torch's warning."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert any(re.match(r"numpy\b", each) for each in needed)
    assert "numpy" in started["first"]
    without = f"import sys; sys.modules['numpy'] = None\n{LOOK}"
    done = python("-W", "error", "-c", without, str(ROOT), "first", cwd=ROOT)
    assert done.returncode and "umpy" in done.stderr


@pytest.mark.parametrize("name", OUTER)
def test_a_bare_import_of_an_outer_folder_is_refused(name: str) -> None:
    done = python("-c", f"import {name}", cwd=ROOT)
    assert done.returncode != 0
    assert f"ImportError: import this package as fxpipe.{name}" in done.stderr


@pytest.mark.parametrize("name", OUTER)
def test_the_links_to_the_outer_folders_are_relative(name: str) -> None:
    assert os.readlink(ROOT / "fxpipe" / name) == f"../{name}"
