"""Count the bytes that CPU devices hold while a pipe runs, by storage.

Each device counts as if it had its own memory: values are copied when they arrive, and a value in
flight belongs to no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

import fxpipe
from fxpipe.extensions.ranks import packing
from fxpipe.ir import instruction as ins
from fxpipe.runtime import interpreter
from fxpipe.runtime.interpreter import Machine, run_own
from fxpipe.torchtools.counting import Counting

Handler = Callable[[Machine, Any], None]

R = TypeVar("R")


class Counted:
    """What one device holds.

    Attributes:
        levels: for each instruction that ran since ``clear``, in order, the most bytes while it
            ran.
    """

    def __init__(self) -> None:
        self.counting = Counting()
        self.levels: list[int] = []

    @property
    def peak(self) -> int:
        """The most bytes at once since ``clear``."""
        return max(self.levels, default=self.counting.alive)

    def clear(self) -> None:
        """Forget the levels."""
        self.levels.clear()

    def handle(self, handler: Handler, machine: Machine, instruction: Any) -> None:
        """Run an instruction, and count."""
        if machine.position == 0:
            homes = enumerate(machine.program.placement)
            for stage in (stage for stage, home in homes if home == machine.device):
                # where a stage writes buffers, its steps read copies of them
                self.counting.adopt(machine.weights.buffers(stage))
        if isinstance(instruction, ins.Forward):  # what it reads was perhaps made between two steps
            version = machine.step + instruction.version
            self.counting.adopt(machine.weights.parameters(instruction.stage, version))
        self.counting.peak = self.counting.alive
        values = machine.store.values
        if isinstance(instruction, ins.Send):
            home, name = machine.program.destination(instruction), machine.named(instruction.buffer)
            machine.channels.put(home, name, _copied(values[instruction.buffer]))
        else:
            with self.counting:
                handler(machine, instruction)
        if isinstance(instruction, ins.Load | ins.Receive):
            values[instruction.buffer] = _copied(values[instruction.buffer])
            self.counting.adopt(values[instruction.buffer])
        self.levels.append(self.counting.peak)


@contextmanager
def counted(pipe: fxpipe.Pipeline) -> Iterator[list[Counted]]:
    """While it is open, device → what it holds; no other pipe may run.

    Args:
        pipe: a pipe that is prepared, so that it is known where its parameters are.
    """
    found = [Counted() for _ in pipe.devices]
    state = {**dict(pipe.named_parameters()), **dict(pipe.named_buffers())}
    for stage, home in zip(pipe.plan.stages, pipe.schedule.placement, strict=True):
        own = [state[a.target] for a in (*stage.parameters, *stage.buffers) if a.target in state]
        found[home].counting.adopt([own, [tensor.grad for tensor in own]])

    def counting(handler: Handler) -> Handler:
        def handle(machine: Machine, instruction: Any) -> None:
            found[machine.device].handle(handler, machine, instruction)

        return handle

    def uncounted(method: Callable[..., R]) -> Callable[..., R]:
        def call(*args: Any) -> R:
            with _disable_current_modes():
                return method(*args)

        return call

    kinds = ins.every_opcode().values()
    handlers = {kind: counting(run_own) for kind in kinds}
    with (
        patch.object(interpreter, "HANDLERS", handlers),
        patch.object(packing, "pack", uncounted(packing.pack)),
    ):
        yield found


def _copied(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: torch.empty_like(x).copy_(x), value)
