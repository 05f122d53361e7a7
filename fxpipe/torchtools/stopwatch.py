"""Measure how long operations take: on the host, or asynchronously on a CUDA device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Stopwatch(Protocol):
    """Takes marks between operations, and later tells the times between them."""

    def mark(self) -> Any:
        """A mark after everything that was called so far."""
        ...

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """The seconds from one mark to the other, for each pair. It may wait for the device."""
        ...


class HostStopwatch:
    """For operations that are done when they return. See Stopwatch."""

    def mark(self) -> float:
        """See Stopwatch.mark."""
        return time.perf_counter()

    def seconds(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """See Stopwatch.seconds."""
        return [end - start for start, end in spans]


class CudaStopwatch:
    """For operations that are launched on the current stream of a CUDA device. See Stopwatch.

    If an operation runs faster than the host can launch it, its launch time is what is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """See Stopwatch.mark."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, spans: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        """See Stopwatch.seconds. Waits until the device has finished everything launched on it."""
        torch.cuda.synchronize(self._device)
        return [1e-3 * start.elapsed_time(end) for start, end in spans]


def stopwatch_for(values: Iterable[Any]) -> Stopwatch:
    """The stopwatch for operations on these values."""
    for value in values:
        if isinstance(value, Tensor) and value.device.type == "cuda":
            return CudaStopwatch(value.device)
    return HostStopwatch()
