"""CUDA streams and graphs: a device's computations, captured once and then launched as one.

torch has 32 streams per device and hands them out round-robin, so that two users may get the same
one. A compute stream must not be shared: other work on it would wait for the computations before
it, and would become a part of a capture there.

While a capture runs, no thread may synchronize with its device or make another stream wait for the
capturing one. ``ALONE`` keeps everything of that kind in this library apart from captures. Besides,
torch allows one capture at a time in a process.

Random numbers: torch can replay those of a generator that was registered with
``CUDAGraph.register_generator_state``, from an offset that it advances. Here each draw has a seed
of its own instead, a number on the host that is read at the launch. So stages that draw random
numbers are not captured.
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
"""Held during a capture, and while a thread synchronizes with a device or orders its streams."""


TRIES = 32
"""How many streams of torch's pool to try: all of a device's, if no other code takes any."""


class Streams:
    """Streams that no other instance of this class computes on, as long as this object lives."""

    def __init__(self) -> None:
        """There are no streams yet."""
        self._own: list[tuple[torch.cuda.Stream, bool]] = []
        with _lock:
            _all[self] = None

    def take(self, stream: torch.cuda.Stream) -> torch.cuda.Stream:
        """Compute on a stream that the user has chosen."""
        with _lock:
            self._own.append((stream, True))
        return stream

    def make(self, device: torch.device, *, computes: bool = False) -> torch.cuda.Stream:
        """Make a stream. A compute stream is not shared; one for copies is shared with other copies
        if necessary."""
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
    """Captures the computations of one slot on the current stream; see Graphs.

    The captures of a slot share one memory pool. Several slots cannot share a pool: a later capture
    may keep its results where an earlier one had temporary values, so graphs that share a pool must
    be replayed in the order of their captures. Micro-batches in flight run in another order.
    """

    def __init__(self) -> None:
        """Nothing is captured yet, and CUDA is not used yet."""
        self._streams = Streams()
        self._aside: torch.cuda.Stream | None = None
        self._pool: Any = None
        # a pool that no graph uses any more cannot be used again
        self._first: torch.cuda.CUDAGraph | None = None

    def capture(self, run: Callable[[], T], what: str) -> tuple[T, Callable[[], None]]:
        """See Graphs.capture. It waits for the device."""
        with ALONE:
            torch.cuda.synchronize()  # so that a failure of earlier work is not taken for this one
            # captured kernels run where the stream's do: a green context has streams of its own
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
                cause = error.__context__ or error  # ending a broken capture raises once more
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
    """End the allocations of a failed capture: before 2.12 torch goes on to allocate in its pool
    (pytorch#180395), as if later work were a part of the capture."""
    if torch.__version__ < (2, 12):  # type: ignore[operator]
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
