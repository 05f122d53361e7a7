"""A ``torch.cuda`` on the CPU, as far as the CUDA backend uses it: streams are never behind.

It refuses what torch refuses: to wait for an event that was not recorded is nothing, to take the
time between events that keep none is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import pytest
import torch

CPU = torch.device("cpu")


class Stream:
    """Does all at once. Attributes: ``device``; ``given``: what it was asked, in order."""

    def __init__(self, device: Any = None) -> None:
        self.device = CPU if device is None else torch.device(device)
        self.given: list[str] = []

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)
        self.given.append("wait")

    def wait_stream(self, stream: Stream) -> None:
        self.given.append("wait")


class Event:
    """A point in time. Attributes: ``done``: whether streams come to theirs; ``fails``: what all
    of them raise when they are asked."""

    done = True
    fails: Exception | None = None

    def __init__(self, enable_timing: bool = False) -> None:
        self._timed = enable_timing
        self._at: float | None = None

    def record(self, stream: Stream) -> None:
        self._raise()
        stream.given.append("record")
        self._at = perf_counter()

    def query(self) -> bool:
        self._raise()
        return self.done

    def synchronize(self) -> None:
        self._raise()

    def elapsed_time(self, other: Event) -> float:
        if not (self._timed and other._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        assert self._at is not None and other._at is not None
        return 1e3 * (other._at - self._at)

    @staticmethod
    def _raise() -> None:
        if Event.fails is not None:
            raise Event.fails


class Cuda:
    """What a test can look at.

    Attributes:
        current: the streams that are current, the innermost last.
        default: the stream that nobody has made.
        ranges: the names of all ranges, in order.
        waits: how often the host has waited for a device.
    """

    def __init__(self) -> None:
        self.current = [Stream()]
        self.default = Stream()
        self.ranges: list[str] = []
        self.waits = 0

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        yield

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        self.ranges.append(name)
        yield

    def synchronize(self, device: Any = None) -> None:
        self.waits += 1


def install(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Put it in place of torch.cuda, where nothing needs a CUDA device then."""
    cuda = Cuda()
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": cuda.stream,
        "current_stream": lambda device=None: cuda.current[-1],
        "default_stream": lambda device=None: cuda.default,
        "synchronize": cuda.synchronize,
        "mem_get_info": lambda device=None: (1 << 30, 80 << 30),
        "max_memory_allocated": lambda device=None: 79 << 30,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nvtx, "range", cuda.range)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    return cuda
