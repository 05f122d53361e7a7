"""An accelerator on the CPU, as far as the runtime uses it: streams are never behind.

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

from fxpipe.torchtools import accelerator
from fxpipe.torchtools.accelerator import Accelerator

CPU = torch.device("cpu")


class Stream:
    """Does all at once. Attributes: ``device``; ``given``: what it was asked, in order."""

    def __init__(self, device: Any = None) -> None:
        self.device = CPU if device is None else torch.device(device)
        self.given: list[str] = []

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)
        self.given.append("wait")

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Event:
    """A point in time. Attributes: ``done``: whether streams come to theirs; ``fails``: what all
    of them raise when they are asked."""

    done = True
    fails: Exception | None = None

    def __init__(self, device: Any = None, enable_timing: bool = False) -> None:
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
    def range(self, name: str) -> Iterator[None]:
        self.ranges.append(name)
        yield

    def synchronize(self, device: Any = None) -> None:
        self.waits += 1


def install(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Make CPU devices accelerators, where nothing needs another one then."""
    cuda = Cuda()
    everywhere: dict[str, Any] = {
        "current_stream": lambda device=None: cuda.current[-1],
        "synchronize": cuda.synchronize,
    }
    devices: dict[str, Any] = {
        **everywhere,
        "current_device_index": lambda: 0,
        "set_device_index": lambda device: None,
        "set_stream": lambda stream: None,
    }
    graphs: dict[str, Any] = {**everywhere, "default_stream": lambda: cuda.default}
    for name, value in devices.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    for name, value in graphs.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(accelerator, "_numbered", lambda like, number: cuda.default)
    monkeypatch.setattr(Accelerator, "memory", lambda self, device: (79 << 30, 80 << 30))
    kind = Accelerator("cpu", blocking="CUDA_LAUNCH_BLOCKING", span=lambda name: cuda.range(name))
    monkeypatch.setitem(accelerator.KINDS, "cpu", kind)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    return cuda
