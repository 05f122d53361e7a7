"""Devices that work by themselves: what their backends have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from fxpipe.dispatch import dispatch_order
from fxpipe.program import Program
from fxpipe.runtime.backend import Common
from fxpipe.runtime.cpu import CpuWires
from fxpipe.runtime.driver import Alone, Driver, InTurn
from fxpipe.runtime.interpreter import Machine
from fxpipe.runtime.launching import Lanes, LaunchingMachine, LaunchingWires
from fxpipe.runtime.trail import Trail, Unfinished

Dispatch = Literal["device", "thread"]
"""Who launches: a host thread for each device, or one for all."""


class Launcher:
    """Launches on lanes that are kept from run to run. Most of a Backend."""

    def __init__(self, lanes: Sequence[Lanes], places: Sequence[str], dispatch: Dispatch) -> None:
        """Nothing is launched yet.

        Args:
            lanes: device of the program → its streams.
            places: device → what messages call it.
            dispatch: whether each "device" has a host thread that launches its instructions, or
                one "thread" launches those of all, in an order in which it never has to wait.
        """
        self.threads = 1 if dispatch == "thread" else len(lanes)
        self._lanes = tuple(lanes)
        self._in_turn = dispatch == "thread"
        self._trails = [Trail(device, place) for device, place in enumerate(places)]
        self._orders: dict[int, tuple[Program, Sequence[int]]] = {}

    def wires(self, program: Program) -> CpuWires:
        """See Backend.wires: values go by reference, and the receiver copies."""
        return LaunchingWires(program, self.threads)

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

    def drivers(self, machines: Sequence[Machine]) -> Sequence[Driver]:
        """See Backend.drivers."""
        if not self._in_turn:
            return [Alone(machine) for machine in machines]
        program = machines[0].program
        if id(program) not in self._orders:  # the program is kept, or its id could be another's
            self._orders[id(program)] = program, dispatch_order(program)
        launching = [machine for machine in machines if isinstance(machine, LaunchingMachine)]
        return [InTurn(launching, self._orders[id(program)][1])]

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
