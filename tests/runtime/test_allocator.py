"""The C library's allocator: one arena for all threads, which keeps memory from step to step."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from fxpipe.torchtools import allocator
from tests.helpers.tiny import batch, pipe_of


class Library:
    """Stands for glibc, and notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def mallopt(self, parameter: int, value: int) -> int:
        self.calls.append((parameter, value))
        return 1

    def malloc_trim(self, pad: int) -> int:
        assert pad == 0
        self.calls.append("trim")
        return 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(allocator, "_glibc", lambda: made)
    monkeypatch.setattr(allocator, "share_memory", allocator.share_memory.__wrapped__)
    for name in ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    return made


def test_memory_is_given_back_after_a_compilation_and_not_in_steps(library: Library) -> None:
    x, y = batch()
    with pipe_of(2) as pipe:
        assert library.calls == [(-8, 1), (-3, 32 << 20), (-1, 1 << 30)]
        library.calls.clear()
        pipe.step(x, target=y)
        assert library.calls == ["trim"]
        pipe.step(x, target=y)
        assert library.calls == ["trim"]
        pipe.eval()
        pipe(x)
        assert library.calls == ["trim"] * 2
    assert library.calls == ["trim"] * 3  # it is closed


def test_the_environment_has_the_last_word(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")
    with pipe_of(2):
        assert library.calls == [(-3, 32 << 20)]


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_glibc", lambda: None)
    x, y = batch()
    with pipe_of(2) as pipe:
        pipe.step(x, target=y)


ARENAS = """
import ctypes, tempfile, threading
import torch
library = ctypes.CDLL(None)
library.fdopen.restype = ctypes.c_void_p

def arenas():
    with tempfile.TemporaryFile() as file:
        stream = ctypes.c_void_p(library.fdopen(file.fileno(), b"w"))
        library.malloc_info(0, stream)
        library.fflush(stream)
        file.seek(0)
        return file.read().count(b"<heap ")

def started(count):
    for _ in range(count):
        threading.Thread(target=end.wait, daemon=True).start()
    return arenas()

end = threading.Event()
before = arenas()
each = started(3) - before
from fxpipe.torchtools.allocator import share_memory
share_memory()
before = arenas()
print(each, started(3) - before)
"""


@pytest.mark.skipif(allocator._glibc() is None, reason="of glibc")
def test_threads_that_start_later_share_an_arena() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ARENAS], capture_output=True, text=True, check=True
    )
    assert done.stdout == "3 0\n"
