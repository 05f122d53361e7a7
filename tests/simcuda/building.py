"""Compile simcuda.cpp, once for each version of torch and of that file, and load it."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

SOURCE = Path(__file__).with_name("simcuda.cpp")


def missing() -> str:
    """Why the simulated CUDA cannot be had here; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "the simulated CUDA is for Linux"
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "torch has a CUDA of its own here, which the simulated one cannot replace"
    if not library().exists() and compiler() is None:
        return "there is no C++ compiler to build the simulated CUDA (such as g++)"
    return ""


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def library() -> Path:
    """Where the library is, or will be: among the user's caches."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parts = (torch.__version__, sys.version, platform.machine(), SOURCE.read_text())
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return caches / "fxpipe" / "simcuda" / key / "_simcuda.so"


def build() -> Path:
    """Compile the library if it is not there; other processes wait meanwhile. Takes half a minute.

    Raises:
        RuntimeError: the compiler fails; its output is the text.
    """
    made = library()
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with open(made.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            partial = made.with_suffix(".partial")
            _compile(partial)
            partial.rename(made)
    return made


def _compile(target: Path) -> None:
    root = Path(torch.__file__).parent
    includes = (
        root / "include",
        root / "include/torch/csrc/api/include",
        sysconfig.get_paths()["include"],
    )
    command = [
        *(compiler() or "g++", "-O1", "-std=c++20", "-fPIC", "-shared", "-w"),
        *(f"-I{folder}" for folder in includes),
        *(str(SOURCE), "-o", str(target), f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"),
        *("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated CUDA does not compile:\n{done.stderr[-4000:]}")


@cache
def load() -> ModuleType:
    """The library. Loading it fills the CUDA dispatch key of this process, for good."""
    path = build()
    loader = importlib.machinery.ExtensionFileLoader("_simcuda", str(path))
    spec = importlib.util.spec_from_file_location("_simcuda", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
