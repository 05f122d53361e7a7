"""What runs the devices' lists: one interface, for devices of any kind."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from fxpipe.ir.plan import Stage
from fxpipe.ir.program import Program
from fxpipe.runtime.devices.workers import Channels
from fxpipe.runtime.interpreter import Job, Machine
from fxpipe.runtime.trail import Unfinished
from fxpipe.runtime.weights.live import Weights


class DeviceMemory(NamedTuple):
    """The memory of a device.

    Attributes:
        place: what it is called; devices of one name share it.
        used: the most bytes that this process has had there, or None where nobody counts.
        total: its bytes, or None where they are not known.
    """

    place: str
    used: int | None
    total: int | None


class Backend:
    """Devices of one kind, kept from run to run.

    As it stands here they are on the CPU, where an instruction is done when it returns. What other
    devices do in another way, their backend says.
    """

    def channels(self, program: Program, threads: int) -> Channels:
        """The way between the devices in one run, which so many threads drive."""
        return Channels(program, threads)

    def machine(
        self,
        program: Program,
        device: int,
        stages: Sequence[Stage],
        jobs: Mapping[int, Job],
        channels: Any,
        weights: Weights,
        first: int,
    ) -> Machine:
        """One device in one run, see Machine, whose first step has this number."""
        return Machine(program, device, stages, jobs, channels, weights, step=first)

    def begin(self) -> None:
        """The caller starts a run: the devices may read what the caller has made."""

    def end(self) -> None:
        """A run is launched: the caller may read what the devices make."""

    def computing(self, device: int) -> AbstractContextManager[None]:
        """Within it, what a device's thread computes comes after the device's computations."""
        return nullcontext()

    def nanoseconds(self, device: int, times: Sequence[Any]) -> list[int]:
        """The times that a machine has taken, of one clock for all devices. It may wait."""
        return list(times)

    def memory(self, device: int) -> DeviceMemory:
        """The memory of a device; those on the CPU share the machine's."""
        known = "SC_PHYS_PAGES" in os.sysconf_names
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None
        return DeviceMemory("the CPU", None, total)

    def generators(self) -> Mapping[str, torch.Generator]:
        """Device, where it has one of its own → torch's generator for it."""
        return {}

    def unfinished(self, error: BaseException) -> Sequence[Unfinished]:
        """For an error that devices report late, what they may be at; else nothing."""
        return ()
