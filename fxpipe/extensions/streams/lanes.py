"""The streams of a device: launching on them, ordering them by events, and copying to the device.

All memory of a device is allocated on its compute stream, even for values that arrive on another
stream. So the caching allocator reuses a block only for later work on that stream, and no block has
to be held back by ``record_stream``.

torch has 32 streams per device and hands them out round-robin, so two users may get the same
stream. A compute stream must not be shared: other work on it would wait for the computations before
it, and would become a part of a capture there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe.extensions.streams.kinds import kind_of
from fxpipe.ir.launch import COMPUTE
from fxpipe.ir.plan import ValueSpec
from fxpipe.torchtools.accelerator import Place, home, timed_event

ALONE = threading.RLock()
"""Held during a capture, and while a thread synchronizes with a device or orders its streams."""

TRIES = 32
"""How many streams of torch's pool to try: all streams of a device, if no other code takes any."""


class current:
    """A block in which a stream is the current one of its device, and its device the current one.

    Unlike ``with stream:``, the block may be inside of another one of the same stream, and several
    threads may be in theirs.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._device = torch.accelerator.current_device_index()
        self._before = torch.accelerator.current_stream(self._stream.device)
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.accelerator.set_stream(self._before)
        torch.accelerator.set_device_index(self._device)


def plain(stream: torch.Stream) -> torch.Stream:
    """A stream as a torch.Stream: torch.cuda.Stream and the like are equal to their own class
    alone."""
    if type(stream) is torch.Stream:
        return stream
    return torch.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


class Lanes:
    """The streams of one device of a program, kept from run to run.

    Attributes:
        device: the device.
        kind: its kind.
    """

    def __init__(self, place: Place) -> None:
        """Make a compute stream on a device, or take the given stream; other streams are made at
        their first use."""
        self.device = home(place)
        self.kind = kind_of(self.device)
        self._place = place  # a stream of the user's may end with its object
        self._streams: dict[str, torch.Stream] = {}
        # name of the receiving stream, source device → the source's stream that does the copy
        self._leaving: dict[tuple[str, torch.device], torch.Stream] = {}
        with _lock:
            self._streams[COMPUTE] = (
                plain(place) if isinstance(place, torch.Stream) else _stream(place, computes=True)
            )
            _all.add(self)
        # device → the end of what the caller had launched there before the run
        self._before: Mapping[torch.device, torch.Event] = {}
        self._followed: torch.Event | None = None  # see ``follow``
        self._reading: torch.Event | None = None  # the end of the last copy of pinned memory

    def stream(self, name: str) -> torch.Stream:
        """A stream by its name in programs. One made during a run is ordered like the others."""
        if name not in self._streams:
            with _lock:
                self._streams[name] = made = self._after_caller(_stream(self.device))
            if self._followed is not None:
                made.wait_event(self._followed)
        return self._streams[name]

    def _after_caller(self, stream: torch.Stream) -> torch.Stream:
        """Order a stream after what the caller had launched on its device before the run."""
        if stream.device in self._before:
            stream.wait_event(self._before[stream.device])
        return stream

    @contextmanager
    def on(self, stream: str, name: str) -> Iterator[None]:
        """Launch on a stream inside the block, under a name for profilers."""
        with current(self.stream(stream)), self.kind.span(name):
            yield

    def wait(self, stream: str, mark: torch.Event) -> None:
        """Order later launches on a stream after a mark, which may be another device's."""
        self.stream(stream).wait_event(mark)

    def mark(self, stream: str) -> torch.Event:
        """Mark the end of what was launched on a stream so far."""
        return self.stream(stream).record_event()

    def bring(self, stream: str, value: Any) -> Any:
        """Copy the tensors of a value to the device's memory, on a stream; but no integers of the
        host."""
        return pytree.tree_map_only(Tensor, lambda tensor: self._copied(stream, tensor), value)

    def take(self, value: Tensor) -> Tensor:
        """Copy a tensor to the host's memory, on the current stream. torch does not reuse pinned
        memory before copies from it are done."""
        return _pinned_like(value).copy_(value, non_blocking=True)

    def put(self, value: Tensor) -> Tensor:
        """Copy what ``take`` returned back to the device's memory, on the current stream. Nobody
        waits for it: the caller has no such memory to overwrite."""
        return self._like(value).copy_(value, non_blocking=True)

    def _like(self, value: Tensor) -> Tensor:
        with current(self.stream(COMPUTE)):
            return torch.empty_like(value, device=self.device)

    def room(self, spec: ValueSpec) -> Tensor:
        """Allocate the device's memory for a value, with the strides that ``bring`` gives it."""
        with current(self.stream(COMPUTE)):
            return spec.room(self.device)

    def begin(self, before: Mapping[torch.device, torch.Event]) -> None:
        """Order all streams after an event on their device. The caller holds ``ALONE``."""
        # a batch that is still to be loaded may be on a device that these do not name
        self._before = {**self._before, **before}
        for stream in self.every():
            self._after_caller(stream)

    def end(self, others: Sequence[torch.Stream] = ()) -> None:
        """Order what the calling thread launches next after all streams, and ``others`` too. The
        thread itself waits only for copies from its pinned memory, which it may overwrite
        afterwards."""
        with ALONE:
            for stream in self.every():
                done = stream.record_event()
                torch.accelerator.current_stream(stream.device).wait_event(done)
                for other in others:
                    if other.device == stream.device:
                        other.wait_event(done)
            if self._reading is not None:
                self._reading.synchronize()
                self._reading = None

    def follow(self, stream: str) -> None:
        """Order what is launched later, on any stream, after what this stream was given so far."""
        self._followed = self.mark(stream)
        for other in list(self._streams.values()):
            other.wait_event(self._followed)

    def every(self) -> list[torch.Stream]:
        """All streams; a copy of the list, as another thread may add one meanwhile."""
        return [*self._streams.values(), *self._leaving.values()]

    def close(self) -> None:
        """Leave the streams to others: torch has few."""
        with _lock:
            _all.discard(self)

    def reached(self, mark: torch.Event) -> bool:
        """Whether a stream has passed a mark. Raises any error that the device reports."""
        return bool(mark.query())

    def moment(self, stream: str) -> torch.Event:
        """Mark the end of a stream like ``mark``; the mark keeps the time when it is reached."""
        return timed_event(self.stream(stream))

    def nanoseconds(self, moments: Sequence[torch.Event]) -> list[int]:
        """The times of moments by the host's clock. Waits until the device has reached them."""
        with ALONE:
            torch.accelerator.synchronize(self.device)
        now = self.moment(COMPUTE)
        now.synchronize()
        host = perf_counter_ns()
        return [host - round(1e6 * moment.elapsed_time(now)) for moment in moments]

    def _copied(self, stream: str, value: Tensor) -> Tensor:
        if value.is_cpu and value.dim() == 0 and not value.is_floating_point():
            return value  # such as a seed: the host would have to wait to read it from the device
        target = self._like(value)
        if value.is_cpu:
            # not pin_memory(), which refuses rows that are one in memory
            pinned = value if value.is_pinned() else _pinned_like(value).copy_(value)
            target.copy_(pinned, non_blocking=True)
            if pinned is value:
                self._reading = self.mark(stream)
            return target
        if value.device == self.device:
            return target.copy_(value, non_blocking=True)
        # torch copies on the current streams of both devices and makes each wait for the other
        leaving = self._leaving_stream(stream, value.device)
        with current(leaving), current(self.stream(stream)):
            return target.copy_(value, non_blocking=True)

    def _leaving_stream(self, stream: str, source: torch.device) -> torch.Stream:
        """The stream of the source device that copies for one of this device's streams."""
        key = stream, source
        if key not in self._leaving:
            with _lock:
                self._leaving[key] = self._after_caller(_stream(source))
        return self._leaving[key]


_all: WeakSet[Lanes] = WeakSet()
_lock = threading.Lock()
"""Held from the choice of a stream until its lanes have it."""


def _stream(device: torch.device, *, computes: bool = False) -> torch.Stream:
    """Make a stream on which no other lanes compute. One that ``computes`` is not shared; one for
    copies is shared with other copies if torch has no more."""
    taken = [s for x in _all for s in (x.every() if computes else [x.stream(COMPUTE)])]
    for _ in range(TRIES):
        stream = torch.Stream(device)
        if stream not in taken:
            break
    return stream


def _pinned_like(value: Tensor) -> Tensor:
    """Allocate pinned memory of the host for a value."""
    return torch.empty_like(value, device="cpu", pin_memory=True)
