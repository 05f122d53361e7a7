"""CUDA streams and graphs: what a device computes, captured once and launched as one from then on.

torch has 32 streams a device and hands them out in turn, again and again. A stream that computes
is nobody else's: what else were given to it would wait for the computations before it, and would
become a part of them where they are captured.

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
from weakref import WeakKeyDictionary

import torch

from fxpipe.errors import CaptureError

T = TypeVar("T")

ALONE = threading.RLock()
"""Held while something is captured, and while streams are made to wait from outside."""


TRIES = 32
"""Streams of torch's pool to look at: all of a device, where nobody else asks meanwhile."""


class Streams:
    """The streams of one user. They are its own as long as it has this."""

    def __init__(self) -> None:
        """It has none yet."""
        self._own: list[tuple[torch.cuda.Stream, bool]] = []
        with _lock:
            _all[self] = None

    def take(self, stream: torch.cuda.Stream) -> torch.cuda.Stream:
        """Compute on a stream that somebody has chosen."""
        with _lock:
            self._own.append((stream, True))
        return stream

    def make(self, device: torch.device, *, computes: bool = False) -> torch.cuda.Stream:
        """Make a stream.

        Args:
            device: where.
            computes: whether it is to compute; then nobody else may have it. A stream that
                copies is shared with others that do, if need be.
        """
        with _lock:
            others = [pair for each in _all for pair in each._own]
            computing = [stream for stream, own in others if own]
            taken = [stream for stream, _ in others] if computes else computing
            stream = torch.cuda.Stream(device)
            for _ in range(TRIES):
                if stream not in taken:
                    break
                stream = torch.cuda.Stream(device)
            self._own.append((stream, computes))
        return stream


_all: WeakKeyDictionary[Streams, None] = WeakKeyDictionary()
_lock = threading.Lock()


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
