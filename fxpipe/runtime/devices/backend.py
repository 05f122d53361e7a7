"""What runs the devices' lists: one interface, for devices of any kind."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch

from fxpipe.ir.plan import Stage
from fxpipe.ir.program import Program
from fxpipe.runtime.devices.cpu import CpuWires
from fxpipe.runtime.interpreter import Job, Machine, Weights
from fxpipe.runtime.trail import Unfinished


class Common(NamedTuple):
    """What all machines of a run share; see Machine."""

    program: Program
    stages: Sequence[Stage]
    jobs: Mapping[int, Job]
    weights: Weights


class Room(NamedTuple):
    """The memory of a device.

    Attributes:
        place: what it is called; devices of one name share it.
        used: the most bytes that this process has had there, or None where nobody counts.
        total: its bytes, or None where they are not known.
    """

    place: str
    used: int | None
    total: int | None


class Backend(Protocol):
    """Devices of one kind, kept from run to run."""

    def wires(self, program: Program, threads: int) -> CpuWires:
        """The way between the devices in one run, which so many threads drive."""
        ...

    def machine(self, wires: CpuWires, device: int, common: Common, first: int) -> Machine:
        """One device in one run, whose first step has this number."""
        ...

    def begin(self) -> None:
        """The caller starts a run: the devices may read what the caller has made."""
        ...

    def end(self) -> None:
        """A run is launched: the caller may read what the devices make."""
        ...

    def computing(self, device: int) -> AbstractContextManager[None]:
        """Within it, what a device's thread computes comes after the device's computations."""
        ...

    def nanoseconds(self, device: int, times: Sequence[object]) -> list[int]:
        """The times that a machine has taken, of one clock for all devices. It may wait."""
        ...

    def room(self, device: int) -> Room:
        """The memory of a device."""
        ...

    def generators(self) -> Mapping[str, torch.Generator]:
        """Device, where it has one of its own → torch's generator for it."""
        ...

    def unfinished(self, error: BaseException) -> Sequence[Unfinished]:
        """For an error that devices report late, what they may be at; else nothing."""
        ...


class CpuBackend:
    """CPU devices, which do one instruction after another. See Backend."""

    def wires(self, program: Program, threads: int) -> CpuWires:
        """See Backend.wires."""
        return CpuWires(program.devices, threads)

    def machine(self, wires: CpuWires, device: int, common: Common, first: int) -> Machine:
        """See Backend.machine."""
        program, stages, jobs, weights = common
        return Machine(program, device, stages, jobs, wires, weights)

    def begin(self) -> None:
        """See Backend.begin: a run has its results when it is through."""

    def end(self) -> None:
        """See Backend.end."""

    def computing(self, device: int) -> AbstractContextManager[None]:
        """See Backend.computing."""
        return nullcontext()

    def nanoseconds(self, device: int, times: Sequence[object]) -> list[int]:
        """See Backend.nanoseconds: they are of the host's clock."""
        return [time for time in times if isinstance(time, int)]

    def room(self, device: int) -> Room:
        """See Backend.room: devices share the machine's memory."""
        known = "SC_PHYS_PAGES" in os.sysconf_names
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None
        return Room("the CPU", None, total)

    def generators(self) -> Mapping[str, torch.Generator]:
        """See Backend.generators: that for the CPU is enough."""
        return {}

    def unfinished(self, error: BaseException) -> Sequence[Unfinished]:
        """See Backend.unfinished: an instruction is done when it returns."""
        return ()
