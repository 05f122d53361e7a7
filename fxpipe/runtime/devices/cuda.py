"""CUDA devices of one process: streams, events, copies between devices, and their errors.

Importing this module needs no CUDA. All memory of a device is allocated on its compute stream, even
for values that arrive on another stream. So the caching allocator reuses a block only for later
work on that stream, and no block has to be held back by ``record_stream``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe.ir.launch import COMPUTE, PREFETCH
from fxpipe.ir.plan import ValueSpec
from fxpipe.runtime.devices.cuda_graphs import ALONE, Streams
from fxpipe.runtime.devices.launching import Launcher, room
from fxpipe.runtime.failure import DeviceMemory, Unfinished
from fxpipe.runtime.ranks.group import RankGroup

CudaPlace = torch.device | torch.cuda.Stream
"""Where a device of a program runs: on a CUDA device with its index, or on a stream."""


def home(place: CudaPlace) -> torch.device:
    """The CUDA device of a place."""
    return place if isinstance(place, torch.device) else place.device


class CudaLanes:
    """The streams of one device of a program, kept from run to run. See Lanes."""

    def __init__(self, place: CudaPlace) -> None:
        """Make a compute stream on a device, or take the given stream; other streams are made at
        their first use."""
        self.device = home(place)
        self._made = Streams()
        computing = (
            self._made.take(place)
            if isinstance(place, torch.cuda.Stream)
            else self._made.make(place, computes=True)
        )
        self._streams: dict[str, torch.cuda.Stream] = {COMPUTE: computing}
        # name of the receiving stream, source device → the source's stream that does the copy
        self._leaving: dict[tuple[str, torch.device], torch.cuda.Stream] = {}
        # device → the end of what the caller had launched there before the run
        self._before: Mapping[torch.device, torch.cuda.Event] = {}
        self._reading: torch.cuda.Event | None = None  # the end of the last copy of pinned memory

    def stream(self, name: str) -> torch.cuda.Stream:
        """A stream by its name in programs. One made during a run is ordered like the others."""
        if name not in self._streams:
            self._streams[name] = self._after_caller(self._made.make(self.device))
        return self._streams[name]

    def _after_caller(self, stream: torch.cuda.Stream) -> torch.cuda.Stream:
        """Order a stream after what the caller had launched on its device before the run."""
        if stream.device in self._before:
            stream.wait_event(self._before[stream.device])
        elif self._before:  # an input lies on a device that no earlier run has read from
            stream.wait_event(_recorded(torch.cuda.default_stream(stream.device)))
        return stream

    @contextmanager
    def on(self, stream: str, name: str) -> Iterator[None]:
        """See Lanes.on; the name becomes an NVTX range."""
        with torch.cuda.stream(self.stream(stream)), torch.cuda.nvtx.range(name):
            yield

    def wait(self, stream: str, mark: torch.cuda.Event) -> None:
        self.stream(stream).wait_event(mark)

    def mark(self, stream: str) -> torch.cuda.Event:
        return _recorded(self.stream(stream))

    def bring(self, stream: str, value: Any) -> Any:
        """See Lanes.bring. Copies tensors in any container, but no integer scalars of the host."""
        return pytree.tree_map_only(Tensor, lambda tensor: self._copied(stream, tensor), value)

    def take(self, value: Tensor) -> Tensor:
        """See Lanes.take. torch does not reuse pinned memory before copies from it are done."""
        pinned = torch.empty_like(value, device="cpu", pin_memory=True)
        return pinned.copy_(value, non_blocking=True)

    def room(self, spec: ValueSpec) -> Tensor:
        with torch.cuda.stream(self.stream(COMPUTE)):
            return room(spec, self.device)

    def begin(self, before: Mapping[torch.device, torch.cuda.Event]) -> None:
        """Order all streams after an event on their device. The caller holds ``ALONE``."""
        self._before = before
        for stream in self.every():
            self._after_caller(stream)

    def end(self) -> None:
        """Order what the calling thread launches next after all streams. The thread itself waits
        only for copies from its pinned memory, which it may overwrite afterwards."""
        with ALONE:
            for stream in self.every():
                torch.cuda.current_stream(stream.device).wait_event(_recorded(stream))
            if self._reading is not None:
                self._reading.synchronize()
                self._reading = None

    def every(self) -> list[torch.cuda.Stream]:
        """All streams; a copy of the list, as another thread may add one meanwhile."""
        return [*self._streams.values(), *self._leaving.values()]

    def reached(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def moment(self, stream: str) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream(stream))
        return event

    def nanoseconds(self, moments: Sequence[torch.cuda.Event]) -> list[int]:
        """The times of moments by the host's clock. Waits until the device has reached them."""
        with ALONE:
            torch.cuda.synchronize(self.device)
        now = self.moment(COMPUTE)
        now.synchronize()
        host = perf_counter_ns()
        return [host - round(1e6 * moment.elapsed_time(now)) for moment in moments]

    def memory(self) -> DeviceMemory:
        """How much of the device's memory this process has allocated, and the total."""
        _, total = torch.cuda.mem_get_info(self.device)
        return DeviceMemory(str(self.device), torch.cuda.max_memory_allocated(self.device), total)

    def _copied(self, stream: str, value: Tensor) -> Tensor:
        if value.is_cpu and value.dim() == 0 and not value.is_floating_point():
            return value  # such as a seed: the host would have to wait to read it from the device
        with torch.cuda.stream(self.stream(COMPUTE)):
            target = torch.empty_like(value, device=self.device)
        if value.device.type != "cuda":
            pinned = value if value.is_pinned() else value.pin_memory()
            target.copy_(pinned, non_blocking=True)
            if pinned is value and stream != PREFETCH:  # nobody overwrites what was offloaded
                self._reading = self.mark(stream)
            return target
        if value.device == self.device:
            return target.copy_(value, non_blocking=True)
        # torch copies on the current streams of both devices and makes each wait for the other
        leaving = self._leaving_stream(stream, value.device)
        with torch.cuda.stream(leaving), torch.cuda.stream(self.stream(stream)):
            if reaches(self.device, value.device):
                return target.copy_(value, non_blocking=True)
        return self._through_host(target, value, self.stream(stream), leaving)

    def _leaving_stream(self, stream: str, source: torch.device) -> torch.cuda.Stream:
        """The stream of the source device that copies for one of this device's streams."""
        key = stream, source
        if key not in self._leaving:
            self._leaving[key] = self._after_caller(self._made.make(source))
        return self._leaving[key]

    def _through_host(
        self,
        target: Tensor,
        value: Tensor,
        arriving: torch.cuda.Stream,
        leaving: torch.cuda.Stream,
    ) -> Tensor:
        """Copy through pinned memory, which torch reuses only when both copies are done."""
        staged = torch.empty_like(value, device="cpu", pin_memory=True)
        leaving.wait_event(_recorded(arriving))
        with torch.cuda.stream(leaving):
            staged.copy_(value, non_blocking=True)
        arriving.wait_event(_recorded(leaving))
        with torch.cuda.stream(arriving):
            return target.copy_(staged, non_blocking=True)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event at the end of what was launched on a stream so far."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


@cache
def reaches(device: torch.device, other: torch.device) -> bool:
    """Whether a device can read another's memory."""
    return torch.cuda.can_device_access_peer(device.index or 0, other.index or 0)


def is_late(error: BaseException) -> bool:
    """Whether an error may be CUDA's late report of an earlier failure.

    With CUDA_LAUNCH_BLOCKING=1 it cannot be: every launch waits until it is done.
    """
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and str(error).startswith("CUDA error")
    )


class CudaBackend(Launcher):
    """CUDA devices. See Backend."""

    def __init__(self, places: Sequence[CudaPlace], group: RankGroup | None = None) -> None:
        """Make the streams of each device. The same CUDA device may be given more than once."""
        self.lanes = [CudaLanes(place) for place in places]
        super().__init__(self.lanes, [str(lanes.device) for lanes in self.lanes], group)

    def begin(self) -> None:
        with ALONE:
            # with those of other devices, from which inputs are loaded
            devices = {stream.device for lanes in self.lanes for stream in lanes.every()}
            before = {device: _recorded(torch.cuda.current_stream(device)) for device in devices}
            for lanes in self.lanes:
                lanes.begin(before)

    def end(self) -> None:
        for lanes in self.lanes:
            lanes.end()

    def nanoseconds(self, device: int, times: Sequence[Any]) -> list[int]:
        return self.lanes[device].nanoseconds(times)

    def memory(self, device: int) -> DeviceMemory:
        return self.lanes[device].memory()

    def generators(self) -> Mapping[str, torch.Generator]:
        devices = dict.fromkeys(lanes.device for lanes in self.lanes)
        return {str(d): torch.cuda.default_generators[d.index or 0] for d in devices}

    def unfinished(self, error: BaseException) -> Sequence[Unfinished]:
        return self.left() if is_late(error) else ()
