"""The C library's allocator: one arena for all threads, and memory given back after compiling."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from fxpipe.torchtools import allocator
from tests.helpers.tiny import batch, pipe_of


class Library:
    """Stands for glibc, and notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def mallopt(self, parameter: int, value: int) -> int:
        self.calls.append(("mallopt", parameter, value))
        return 1

    def malloc_trim(self, pad: int) -> int:
        self.calls.append(("malloc_trim", pad))
        return 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(allocator, "_glibc", lambda: made)
    monkeypatch.setattr(allocator, "share_arena", allocator.share_arena.__wrapped__)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    return made


def test_memory_is_given_back_after_a_compilation_and_not_in_steps(library: Library) -> None:
    x, y = batch()
    with pipe_of(2) as pipe:
        assert library.calls == [("mallopt", -8, 1)]
        pipe.step(x, target=y)
        assert library.calls[1:] == [("malloc_trim", 0)]
        pipe.step(x, target=y)
        assert library.calls[1:] == [("malloc_trim", 0)]
        pipe.eval()
        pipe(x)
        assert library.calls[1:] == [("malloc_trim", 0)] * 2


def test_the_environment_has_the_last_word_on_arenas(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    with pipe_of(2):
        assert not library.calls


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
{line}
print(started(3) - before)
"""


@pytest.mark.skipif(
    allocator._glibc() is None or torch.accelerator.current_accelerator() is not None,
    reason="of glibc, and of a torch for CPUs alone",
)
@pytest.mark.parametrize(("line", "more"), [("pass", 3), ("import fxpipe", 0)])
def test_threads_that_start_after_the_import_share_an_arena(line: str, more: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ARENAS.format(line=line)], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{more}\n"
