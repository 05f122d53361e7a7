"""The C library's allocator: one arena for all threads, and memory given back after compiling."""

from __future__ import annotations

from typing import Any

import pytest

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
