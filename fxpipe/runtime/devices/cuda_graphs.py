"""CUDA graphs: what a device computes, captured once and launched as one thing from then on.

A capture takes part in whatever its stream takes part in, so nobody may wait for its device or let
another stream wait for its own while it goes on, whichever thread asks. What this library does of
that kind, ``ALONE`` keeps apart. torch knows one capture of a process at a time besides.

Random numbers: torch replays those of a generator of which ``CUDAGraph.register_generator_state``
has been told, from an offset that it counts on. Here each draw has a seed of its own instead, a
number on the host that launching reads; so stages that draw are not captured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fxpipe.errors import CaptureError
from fxpipe.runtime.devices.cuda_streams import Streams

T = TypeVar("T")

ALONE = threading.RLock()
"""Held while something is captured, and while streams are made to wait from outside."""


class CudaGraphs:
    """Captures what is computed on one slot, on the stream that is current; see Graphs.

    Its captures share a memory pool of their own. A pool for several slots would not do: what one
    capture needs for a moment, a later one may keep its results in, and graphs that share a pool
    may only be replayed in the order of their captures. Micro-batches in flight have another.
    """

    def __init__(self) -> None:
        """Nothing is captured yet; it asks nothing of CUDA."""
        self._streams = Streams()
        self._aside: torch.cuda.Stream | None = None
        self._pool: Any = None
        # a pool that no graph uses any more cannot be used again
        self._first: torch.cuda.CUDAGraph | None = None

    def capture(self, run: Callable[[], T], what: str) -> tuple[T, Callable[[], None]]:
        """See Graphs.capture. The device is waited for."""
        with ALONE:
            torch.cuda.synchronize()  # so that no failure of earlier work is taken for one of this
            # its kernels run where the stream's do: a green context has streams of its own
            stream = torch.cuda.current_stream()
            if stream == torch.cuda.default_stream():  # which cannot be captured
                if self._aside is None:
                    self._aside = self._streams.make(stream.device, computes=True)
                stream = self._aside
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
                ):
                    made = run()
            except Exception as error:
                _end_allocation(stream.device, self._pool)
                cause = error.__context__ or error  # to end a broken capture fails as well
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
                raise CaptureError(
                    f"the {what} cannot be captured into a CUDA graph ({type(cause).__name__}: "
                    f"{cause}): what it calls waits for the device, or copies from the host; "
                    "compile with cuda_graphs=False, or let it work on the device alone"
                ) from cause
            self._first = self._first or graph
        return made, graph.replay


def _end_allocation(device: torch.device, pool: Any) -> None:
    """End what a failed capture has left: before 2.12 torch goes on to allocate in its pool
    (pytorch#180395), and takes whatever comes after it for a part of the capture."""
    if torch.__version__ < (2, 12):  # type: ignore[operator]
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
