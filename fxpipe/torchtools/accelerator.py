"""Where devices of a program are, when their work ends, and their random numbers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

Place = torch.device | torch.Stream
"""Where a device of a program runs: on a device of torch with its index, or on a stream."""


def home(place: Place) -> torch.device:
    """The device of a place."""
    return place if isinstance(place, torch.device) else place.device


def available() -> str | None:
    """The type of this machine's accelerators, such as "cuda"; None if there are none. torch
    supports one type a process."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def kind_here() -> str:
    """The type of the accelerators that this build of torch is for; "cuda" if it is for none."""
    found = torch.accelerator.current_accelerator()
    return "cuda" if found is None else found.type


def timed_event(stream: torch.Stream) -> torch.Event:
    """An event at the end of what was launched on a stream so far, which keeps its time."""
    event = torch.Event(stream.device, enable_timing=True)
    event.record(stream)
    return event


def random_kept(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """A block after which the default generators of the CPU and of tensors' devices are as they
    were before."""
    devices = {x.device.index or 0 for x in tensors if x.device.type not in ("cpu", "meta")}
    return torch.random.fork_rng(sorted(devices), device_type=kind_here())
