"""How long operations take: on the host, or on a CUDA device, which runs behind the host."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Stopwatch(Protocol):
    """Takes marks between operations, and tells later how long it was between them."""

    def mark(self) -> Any:
        """Now: behind all that was called so far."""
        ...

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """How long it was from one mark to the other, for each pair. It may wait."""
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

    Where the device is faster than the host launches, the time of an operation is that of its
    launch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """See Stopwatch.mark."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, spans: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        """See Stopwatch.seconds: it waits until the device has done all that it was given."""
        torch.cuda.synchronize(self._device)
        return [1e-3 * start.elapsed_time(end) for start, end in spans]


def stopwatch_for(values: Iterable[Any]) -> Stopwatch:
    """The stopwatch for operations on these values."""
    for value in values:
        if isinstance(value, Tensor) and value.device.type == "cuda":
            return CudaStopwatch(value.device)
    return HostStopwatch()
