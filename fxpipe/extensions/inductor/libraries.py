"""Keep compiled libraries in a folder, and compile new ones in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from subprocess import DEVNULL, PIPE, Popen
from typing import Any
from weakref import WeakValueDictionary

import torch

from fxpipe.extensions.inductor.kept import folder
from fxpipe.extensions.inductor.library import Library
from fxpipe.torchtools.state import processors

_WORKER = (sys.executable, "-m", "fxpipe.extensions.inductor.worker")

_CALLS_PYTHON = b"aoti_torch_proxy_executor_call_function("
"""Found in the code of libraries with Python operators, which only torch's loader can call."""

_loaded: WeakValueDictionary[tuple[Path, torch.device], Library] = WeakValueDictionary()


def find_library(key: str) -> Path | None:
    """The library of the graph with this key; None if it was not compiled yet."""
    paths = (folder() / f"{key}{suffix}" for suffix in (".so", ".pt2"))
    return next((path for path in paths if path.exists()), None)


def load_library(path: Path, device: torch.device) -> Library:
    """Load a library; all of its users share one object."""
    library = _loaded.get((path, device))
    if library is None:
        library = _loaded[path, device] = Library(path, device)
    return library


def keep_library(key: str, package: Path, device: torch.device) -> None:
    """Move a new package into the folder, or only its library if that can be called directly."""
    with zipfile.ZipFile(package) as files:
        names = files.namelist()
        code = b"".join(files.read(name) for name in names if name.endswith(".wrapper.cpp"))
        library = next((name for name in names if name.endswith(".so")), None)
        if library and device.type == "cpu" and _CALLS_PYTHON not in code:
            package = package.with_suffix(".so")
            package.write_bytes(files.read(library))
    os.replace(package, folder() / f"{key}{package.suffix}")


def compile_all(tasks: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, str]]:
    """Run tasks in parallel, with one process for each processor. As soon as one is done, yield its
    number, and why it failed, or an empty text. See ``worker`` for the form of a task."""
    settings = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TORCHINDUCTOR_CACHE_DIR": str(folder().parent),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    started: list[Popen[str]] = []
    idle: SimpleQueue[Popen[str]] = SimpleQueue()

    def start() -> Popen[str]:
        env = {**os.environ, **settings}
        started.append(Popen(_WORKER, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, env=env))
        return started[-1]

    def answer(task: tuple[Any, ...]) -> str:
        try:
            process = idle.get_nowait()
        except Empty:
            process = start()
        assert process.stdin is not None and process.stdout is not None
        line = ""
        with suppress(OSError):
            process.stdin.write(f"{json.dumps(task)}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            return "the process that was to compile it has ended"
        idle.put(process)
        reason: str = json.loads(line)
        return reason

    pool = ThreadPoolExecutor(processors(), "fxpipe-compile")
    numbers = {pool.submit(answer, task): number for number, task in enumerate(tasks)}
    try:
        for done in as_completed(numbers):
            yield numbers[done], done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in started:
            process.kill()
        pool.shutdown()
        for process in started:
            with process:
                process.kill()


def can_compile() -> bool:
    """Whether there is a C++ compiler."""
    names = os.environ.get("CXX"), "g++", "clang++"
    return any(shutil.which(name) for name in names if name)
