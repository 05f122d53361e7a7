"""The interpreter: one dispatch table and one loop over a device's instructions.

It decides nothing. What an instruction means on its device is a function below; how values and
threads move between devices is the backend's, behind ``Wires``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fxpipe.kernel import Kernel, add
from fxpipe.plan import Stage, outputs_of
from fxpipe.program import (
    Backward,
    Barrier,
    Buffer,
    Forward,
    Free,
    Instruction,
    Load,
    Output,
    Pause,
    Pop,
    Program,
    Receive,
    Send,
    Stash,
    Update,
    forward_buffer,
    gradient_buffer,
    saved,
)
from fxpipe.store import Store


class Stopped(Exception):
    """Another device failed, or the caller interrupted: leave the list where it is."""


class Wires(Protocol):
    """How the devices of one run reach each other."""

    stopping: bool

    def put(self, device: int, buffer: Buffer, value: Any) -> None:
        """Hand a value to a device; never waits."""
        ...

    def get(self, device: int, buffer: Buffer) -> Any:
        """Wait on a device for a value. Raises Stopped when the run is stopped."""
        ...

    def meet(self) -> None:
        """Wait until every device is here. Raises Stopped when the run is stopped."""
        ...


class Host(Protocol):
    """The caller's side of one run."""

    def give(self, buffer: Buffer) -> Any:
        """The value that a Load asks for."""
        ...

    def take(self, buffer: Buffer, value: Any) -> None:
        """Keep what an Output hands over."""
        ...


class Weights(Protocol):
    """The parameters and buffers of the model, by stage and version, and their update."""

    def parameters(self, stage: int, version: int) -> Sequence[torch.Tensor]:
        """A stage's parameters of a version."""
        ...

    def buffers(self, stage: int) -> Sequence[torch.Tensor]:
        """A stage's buffers as they were before the run."""
        ...

    def gradients(self, stage: int) -> Sequence[torch.Tensor | None]:
        """What the sums of a stage's gradients start from."""
        ...

    def update(
        self, stage: int, reads: int, writes: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Make the version ``writes`` of a stage from ``reads`` and the batch's gradients."""
        ...


@dataclass
class Machine:
    """One device in one run.

    Attributes:
        program: what runs.
        device: which of its lists this machine runs.
        stages: the plan's stages.
        kernels: micro-batch → stage → what runs it.
        host: the caller's side.
        wires: the way to the other devices.
        weights: parameters and buffers.
        store: what the device holds.
        position: the index of the instruction that is next, or running.
    """

    program: Program
    device: int
    stages: Sequence[Stage]
    kernels: Sequence[Sequence[Kernel]]
    host: Host
    wires: Wires
    weights: Weights
    store: Store = field(default_factory=Store)
    position: int = 0

    def run(self) -> bool:
        """Run the list from ``position`` on.

        Returns:
            True at its end, False at a pause, after which it can be run again.

        Raises:
            Stopped: another device failed or the run was stopped.
        """
        instructions = self.program.lists[self.device]
        while self.position < len(instructions):
            instruction = instructions[self.position]
            if self.wires.stopping:
                raise Stopped
            HANDLERS[type(instruction)](self, instruction)
            self.position += 1
            if type(instruction) is Pause:
                return False
        return True


def _load(machine: Machine, instruction: Load) -> None:
    machine.store.values[instruction.buffer] = machine.host.give(instruction.buffer)


def _output(machine: Machine, instruction: Output) -> None:
    machine.host.take(instruction.buffer, machine.store.values[instruction.buffer])


def _send(machine: Machine, instruction: Send | Stash) -> None:
    value = machine.store.values[instruction.buffer]
    machine.wires.put(machine.program.destination(instruction), instruction.buffer, value)


def _receive(machine: Machine, instruction: Receive | Pop) -> None:
    value = machine.wires.get(machine.device, instruction.buffer)
    machine.store.values[instruction.buffer] = value


def _forward(machine: Machine, instruction: Forward) -> None:
    stage, i, store = instruction.stage, instruction.microbatch, machine.store
    result = machine.kernels[i][stage].forward(
        machine.weights.parameters(stage, instruction.version),
        _buffers(machine, stage),
        [store.values[forward_buffer(edge, i)] for edge in machine.program.edges_into[stage]],
    )
    edges = machine.program.edges_from[stage]
    made = dict(zip(outputs_of(edges), result.outputs, strict=True))
    for edge in edges:
        store.values[forward_buffer(edge, i)] = made[edge.value]
    for write, value in zip(machine.stages[stage].writes, result.writes, strict=True):
        store.state[write.target] = value
    if instruction.keeps:
        store.keep(saved(stage, i), result.saved)


def _buffers(machine: Machine, stage: int) -> list[torch.Tensor]:
    """The stage's buffers: what earlier micro-batches of this run wrote, else the model's."""
    arguments = machine.stages[stage].buffers
    before = machine.weights.buffers(stage)
    state = machine.store.state
    return [state.get(a.target, b) for a, b in zip(arguments, before, strict=True)]


def _backward(machine: Machine, instruction: Backward) -> None:
    stage, i, store = instruction.stage, instruction.microbatch, machine.store
    gradients = [
        add([store.values[gradient_buffer(edge, i)] for edge in edges])
        for edges in machine.program.gradients_of[stage]
    ]
    result = machine.kernels[i][stage].backward(store.take(saved(stage, i)), gradients)
    edges_back = [edge for edge in machine.program.edges_into[stage] if edge.gradient]
    for edge, gradient in zip(edges_back, result.inputs, strict=True):
        store.values[gradient_buffer(edge, i)] = gradient
    store.accumulate(stage, result.parameters, machine.weights.gradients(stage))


def _free(machine: Machine, instruction: Free) -> None:
    del machine.store.values[instruction.buffer]


def _barrier(machine: Machine, instruction: Barrier) -> None:
    machine.wires.meet()


def _pause(machine: Machine, instruction: Pause) -> None:
    """Nothing to do: the loop returns to the caller."""


def _update(machine: Machine, instruction: Update) -> None:
    stage = instruction.stage
    gradients = machine.store.gradients.pop(stage, [])
    machine.weights.update(stage, instruction.reads, instruction.writes, gradients)


HANDLERS: Mapping[type[Instruction], Callable[[Machine, Any], None]] = {
    Load: _load,
    Output: _output,
    Send: _send,
    Stash: _send,
    Receive: _receive,
    Pop: _receive,
    Forward: _forward,
    Backward: _backward,
    Free: _free,
    Barrier: _barrier,
    Pause: _pause,
    Update: _update,
}
"""Every instruction's meaning."""
