"""``torch.cuda`` over the simulated devices, in a process that has no other use.

``install`` replaces what fxpipe, torch's optimizers and torch's tracer ask of ``torch.cuda``, for
good. ``take`` returns what was noticed since the last time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch._dynamo
import torch._inductor  # like torch._dynamo, it asks at its import whether there is CUDA

from tests.simcuda.building import load

sim: Any = load()


class Mode(IntEnum):
    """When the streams' entries run: at once, as late as possible, in a random order, or in a
    random order in which some streams get nothing for a long time."""

    EAGER = 0
    LAZY = 1
    RANDOM = 2
    STARVING = 3


@dataclass(frozen=True)
class Noticed:
    """What happened since the last look.

    Attributes:
        races: pairs of accesses to the same memory that nothing orders, each once.
        failure: what an operator raised when it ran; empty if none did.
        waits: reason → how often the host has waited for a device.
        counts: what → how often: ``launched``, ``executed``, ``mallocs``, ``reused``, ``frees``,
            ``peer_copies``.
    """

    races: Sequence[str]
    failure: str
    waits: Mapping[str, int]
    counts: Mapping[str, int]


def take() -> Noticed:
    """What was noticed since the last call. Clears a failure, which a GPU would never forget."""
    return Noticed(sim.take_races(), sim.take_failure(), sim.take_waits(), sim.take_counts())


def configure(mode: Mode, seed: int = 0) -> None:
    """Run all that is queued, and then what follows in another mode."""
    sim.configure(int(mode), seed, torch.cuda.device_count())


@contextmanager
def within(device: int, limit: int) -> Iterator[None]:
    """Limit the memory of a device inside the block, in bytes."""
    before = sim.limit(device)
    sim.set_limit(device, limit)
    try:
        yield
    finally:
        sim.set_limit(device, before)


def index_of(device: Any = None) -> int:
    """The index of a device, as ``torch.cuda`` takes devices."""
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    return int(sim.current_device()) if index is None or index < 0 else int(index)


class Stream(torch.Stream):
    """See ``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        if given:
            return super().__new__(cls, **given)
        place = torch.device("cuda", index_of(device))
        return super().__new__(cls, device=place, priority=priority)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    """See ``torch.cuda.Event``."""

    timed: bool

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        device = torch.device("cuda", sim.current_device())
        self = super().__new__(cls, device=device, enable_timing=enable_timing)
        self.timed = enable_timing
        return self

    def record(self, stream: Any = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(current_stream() if stream is None else stream)

    def elapsed_time(self, end_event: Any) -> float:
        if not (self.timed and end_event.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return float(sim.elapsed(self.event_id, end_event.event_id))


def current_stream(device: Any = None) -> Stream:
    found = torch._C._accelerator_getStream(index_of(device))
    return Stream(
        stream_id=found.stream_id,
        device_index=found.device_index,
        device_type=found.device_type,
    )


def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=index_of(device), device_type=1)


class InStream:
    """See ``torch.cuda.stream``."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is None:
            return
        self._device = sim.current_device()
        sim.set_device(self._stream.device_index)
        self._before = current_stream(self._stream.device_index)
        torch._C._accelerator_setStream(self._stream)

    def __exit__(self, *error: Any) -> None:
        if self._stream is None:
            return
        torch._C._accelerator_setStream(self._before)
        sim.set_device(self._device)


class OnDevice:
    """See ``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self._index = index_of(device)

    def __enter__(self) -> None:
        self._before = sim.current_device()
        sim.set_device(self._index)

    def __exit__(self, *error: Any) -> None:
        sim.set_device(self._before)


@contextmanager
def named_range(name: str, *args: Any, **options: Any) -> Iterator[None]:
    before = sim.name_range(name)
    try:
        yield
    finally:
        sim.name_range(before)


def synchronize(device: Any = None) -> None:
    torch._C._accelerator_synchronizeDevice(index_of(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    index = index_of(device)
    return sim.limit(index) - sim.taken(index), sim.limit(index)


def properties(device: Any = None) -> Any:
    class Properties:
        name, major, minor, multi_processor_count = "simulated", 9, 0, 4
        warp_size, max_threads_per_multi_processor, regs_per_multiprocessor = 32, 2048, 65536
        total_memory = sim.limit(index_of(device))

    return Properties


class CUDAGraph:
    """See ``torch.cuda.CUDAGraph``; ``torch.cuda.graph`` itself is torch's."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph: Any = None
        self._pool = graph_pool_handle()

    def capture_begin(
        self,
        pool: tuple[int, int] | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        self._pool = self._pool if pool is None else pool
        stream = current_stream()
        self._graph = sim.begin_capture(stream.device_index, stream.stream_id, self._pool[1])

    def capture_end(self) -> None:
        told = sim.end_capture(self._graph)
        if told:
            self._graph = None
            raise torch.AcceleratorError(told)

    def replay(self) -> None:
        stream = current_stream()
        sim.replay(self._graph, stream.device_index, stream.stream_id)

    def reset(self) -> None:
        self._graph = None

    def pool(self) -> tuple[int, int]:
        return self._pool


_pools = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(_pools)


def install(devices: int) -> None:
    """Give this process so many devices."""
    sim.configure(int(Mode.EAGER), 0, devices)
    replaced: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": InStream,
        "stream": InStream,
        "device": OnDevice,
        "device_of": lambda tensor: OnDevice(tensor.device),
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": torch._C._accelerator_setStream,
        "synchronize": synchronize,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: devices,
        "current_device": sim.current_device,
        "set_device": lambda device: sim.set_device(index_of(device)),
        "can_device_access_peer": lambda device, other: True,
        "mem_get_info": mem_get_info,
        "memory_allocated": lambda device=None: sim.allocated(index_of(device)),
        "max_memory_allocated": lambda device=None: sim.peak(index_of(device)),
        "reset_peak_memory_stats": lambda device=None: sim.reset_peak(index_of(device)),
        "empty_cache": lambda: None,
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "simulated",
        "set_sync_debug_mode": lambda mode: sim.forbid_waits(mode in ("error", 2)),
        "is_current_stream_capturing": sim.is_capturing,
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": graph_pool_handle,
        # stages draw from generators that they make; the devices' own draw nothing
        "default_generators": tuple(torch.Generator() for _ in range(devices)),
        "get_rng_state": lambda device="cuda": torch.zeros(8, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    vars(torch.cuda.nvtx)["range"] = named_range
    vars(torch._C)["_host_emptyCache"] = lambda: None
    plain: Any = torch.UntypedStorage.clone

    def clone(self: torch.UntypedStorage) -> Any:
        if self.device.type != "cuda":
            return plain(self)
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        return whole.clone().untyped_storage()

    setattr(torch.UntypedStorage, "clone", clone)  # noqa: B010
    _add_sizes()


_library: list[torch.library.Library] = []


def _add_sizes() -> None:
    """Give the CPU's convolutions, which run here for CUDA's, the sizes of their results."""
    library = torch.library.Library("aten", "IMPL", "Meta")

    def forward(x: Any, weight: Any, kernel: Any, bias: Any, stride: Any, padding: Any) -> Any:
        ones, none = [1, 1], [0, 0]
        return torch.ops.aten.convolution(x, weight, bias, stride, padding, ones, False, none, 1)

    def backward(
        grad: Any, x: Any, weight: Any, kernel: Any, stride: Any, padding: Any, wanted: Any
    ) -> Any:
        shapes = x.shape, weight.shape, weight.shape[:1]
        return tuple(
            torch.empty(shape, dtype=x.dtype, device="meta") if want else None
            for shape, want in zip(shapes, wanted, strict=True)
        )

    library.impl("_slow_conv2d_forward", forward)
    library.impl("_slow_conv2d_backward.output_mask", backward)
    _library.append(library)
