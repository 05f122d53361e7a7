"""Keep compiled libraries in a folder, and compile new ones in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from fxpipe.extensions.inductor.library import Library
from fxpipe.torchtools.kept import cache_dir, folder, write_json
from fxpipe.torchtools.state import processors

_WORKER = (sys.executable, "-m", "fxpipe.extensions.inductor.worker")

_CALLS_PYTHON = b"aoti_torch_proxy_executor_call_function("
"""Found in the code of libraries with Python operators, which only torch's loader can call."""


@dataclass(frozen=True)
class Record:
    """What is kept beside the library of a graph.

    Attributes:
        suffix: the suffix of the library's file.
        peak: the most bytes that a call of the library adds while it runs.
    """

    suffix: str
    peak: int


class Answer(NamedTuple):
    """A process's answer to the task of compiling a graph.

    Attributes:
        reason: why it could not compile the graph; empty if it could.
        peak: the most bytes that a call of the library adds while it runs.
    """

    reason: str
    peak: int = 0


class Libraries:
    """The libraries in inductor's cache folder, under the keys of their graphs."""

    def __init__(self) -> None:
        self._folder = folder()

    def record(self, key: str) -> Record | None:
        """Read a graph's record; None if it was not compiled yet."""
        with suppress(OSError, ValueError, TypeError):
            record = Record(**json.loads(self._path(key, ".json").read_text()))
            if self._path(key, record.suffix).exists():
                return record
        return None

    def load(self, key: str, suffix: str, device: torch.device) -> Library:
        """Load a library; all of its users share one object."""
        path = self._path(key, suffix)
        library = _loaded.get((path, device))
        if library is None:
            library = _loaded[path, device] = Library(path, device)
        return library

    def scratch(self) -> tempfile.TemporaryDirectory[str]:
        """Make a temporary folder beside the libraries."""
        return tempfile.TemporaryDirectory(dir=self._folder)

    def keep(self, key: str, package: Path, device: torch.device, peak: int) -> None:
        """Move a new package into the folder, or only its library if that can be called directly,
        with its record."""
        with zipfile.ZipFile(package) as files:
            names = files.namelist()
            code = b"".join(files.read(name) for name in names if name.endswith(".wrapper.cpp"))
            library = next((name for name in names if name.endswith(".so")), None)
            if library and device.type == "cpu" and _CALLS_PYTHON not in code:
                package = package.with_suffix(".so")
                package.write_bytes(files.read(library))
        os.replace(package, self._path(key, package.suffix))
        if self.record(key) is None:  # the first measurement counts for all ranks of a host
            write_json(asdict(Record(package.suffix, peak)), self._path(key, ".json"))

    def _path(self, key: str, suffix: str) -> Path:
        return self._folder / f"{key}{suffix}"


_loaded: WeakValueDictionary[tuple[Path, torch.device], Library] = WeakValueDictionary()


def compile_all(tasks: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Answer]]:
    """Run tasks in parallel, with one process for each processor; yield each task's number and
    answer as soon as it is done. See ``worker`` for the form of a task."""
    settings = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TORCHINDUCTOR_CACHE_DIR": cache_dir(),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    started: list[Popen[str]] = []
    idle: SimpleQueue[Popen[str]] = SimpleQueue()

    def start() -> Popen[str]:
        env = {**os.environ, **settings}
        started.append(Popen(_WORKER, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, env=env))
        return started[-1]

    def answer(task: tuple[Any, ...]) -> Answer:
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
            return Answer("the process that was to compile it has ended")
        idle.put(process)
        return Answer(*json.loads(line))

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
