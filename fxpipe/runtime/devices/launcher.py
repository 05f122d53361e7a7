"""Devices that work by themselves: what their backends have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from fxpipe.ir.program import COMPUTE, Program
from fxpipe.runtime.devices.backend import Common
from fxpipe.runtime.devices.cpu import CpuWires
from fxpipe.runtime.devices.launching import Lanes, LaunchingMachine, LaunchingWires
from fxpipe.runtime.interpreter import Machine
from fxpipe.runtime.trail import Trail, Unfinished


class Launcher:
    """Launches on lanes that are kept from run to run. Most of a Backend."""

    def __init__(self, lanes: Sequence[Lanes], places: Sequence[str]) -> None:
        """Nothing is launched yet.

        Args:
            lanes: device of the program → its streams.
            places: device → what messages call it.
        """
        self._lanes = tuple(lanes)
        self._trails = [Trail(device, place) for device, place in enumerate(places)]

    def wires(self, program: Program, threads: int) -> CpuWires:
        """See Backend.wires: values go by reference, and the receiver copies."""
        return LaunchingWires(program, threads)

    def machine(self, wires: CpuWires, device: int, common: Common, first: int) -> Machine:
        """See Backend.machine."""
        assert isinstance(wires, LaunchingWires)
        program, stages, jobs, weights = common
        return LaunchingMachine(
            program,
            device,
            stages,
            jobs,
            wires,
            weights,
            lanes=self._lanes[device],
            events=wires.events,
            trail=self._trails[device],
            first=first,
        )

    def computing(self, device: int) -> AbstractContextManager[None]:
        """See Backend.computing."""
        return self._lanes[device].on(COMPUTE, "statistics")

    def generators(self) -> Mapping[str, torch.Generator]:
        """See Backend.generators: none but that for the CPU."""
        return {}

    def left(self) -> list[Unfinished]:
        """What the devices may be at, as far as they still tell."""
        return [
            each
            for lanes, trail in zip(self._lanes, self._trails, strict=True)
            for each in trail.unfinished(lanes.reached)
        ]
