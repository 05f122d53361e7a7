"""CUDA graphs: a device's computations, captured once and then launched as one.

While a capture runs, no thread may synchronize with its device or make another stream wait for the
capturing one. The lock ``ALONE`` keeps such calls of this library apart from captures, and captures
apart from each other: torch allows one at a time in a process.

Stages that draw random numbers are not captured: each draw has its own seed, which the host reads
at the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from fxpipe.errors import CaptureError
from fxpipe.extensions.streams.lanes import ALONE, Lanes
from fxpipe.ir.launch import COMPUTE

T = TypeVar("T")


class SlotGraphs:
    """Captures the computations of one slot on the current stream.

    The captures of a slot share one memory pool: a replay may overwrite the results of later
    captures, and those of earlier ones that are no longer referenced. One micro-batch at a time
    uses a slot, so the results of a later capture are consumed before an earlier one is replayed.
    Several slots cannot share a pool: a later capture may keep its results where an earlier one had
    temporary values, so graphs that share a pool must be replayed in the order of their captures.
    Micro-batches in flight run in another order.
    """

    def __init__(self) -> None:
        self._aside: Lanes | None = None  # captures in place of the default stream
        self._pool: Any = None
        # kept, as torch cannot use a pool again once its last graph is gone
        self._first: torch.cuda.CUDAGraph | None = None

    def capture(self, run: Callable[[], T], what: str) -> tuple[T, Callable[[], None]]:
        """Capture a call without computing anything; ``what`` is its name in messages. Waits for
        the device.

        Returns:
            The result of the call, and a function whose every call computes the result's tensors.

        Raises:
            CaptureError: an operation of the call cannot be captured.
        """
        failure: Exception | None = None
        with ALONE:
            torch.cuda.synchronize()  # so that an earlier failure is not taken for this capture's
            # not on another stream: captured kernels run in the green context of this one
            stream: Any = torch.cuda.current_stream()
            if stream == torch.cuda.default_stream():  # which cannot be captured
                if self._aside is None:
                    self._aside = Lanes(stream.device)
                stream = self._aside.stream(COMPUTE)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
                ):
                    try:
                        result = run()
                    except Exception as error:
                        failure = error  # ending a broken capture raises another error
                        raise
            except Exception as error:
                _end_allocation(stream.device, self._pool)
                self._pool = self._first = None  # torch may refuse to use this pool again
                cause = failure or error
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
                raise CaptureError(
                    f"the {what} cannot be captured into a CUDA graph ({type(cause).__name__}: "
                    f"{cause}): what it calls waits for the device, or copies from the host; "
                    "leave out the extension CudaGraphs, or let it work on the device alone"
                ) from cause
            self._first = self._first or graph
        return result, graph.replay


def _end_allocation(device: torch.device, pool: Any) -> None:
    """Stop allocating in the pool of a capture that could not be ended: torch before 2.12 does not
    (pytorch#180395), and takes later work for a part of the capture."""
    if torch.__version__ < (2, 12):  # type: ignore[operator]
        with suppress(RuntimeError):  # the capture was ended, and only what ran in it failed
            torch._C._cuda_endAllocateToPool(device.index or 0, pool)
