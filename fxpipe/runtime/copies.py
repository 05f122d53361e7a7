"""A stage's copies on other devices: they get its weights and give back gradients, once a step.

The stage's home device owns the weights and buffers. A copy gets them at the begin of the step. At
the end it gives back the gradients that it has summed over its micro-batches, and the moments of
its BatchNorms. The home device adds them to its own sums, in the order of the copies, and updates.
So copies cannot diverge, and optimizers and checkpoints need not know of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import TYPE_CHECKING

from torch import Tensor

from fxpipe.ir import instruction as ins
from fxpipe.ir.value import own_buffer
from fxpipe.kernels.graph import added
from fxpipe.torchtools.moments import merged

if TYPE_CHECKING:
    from fxpipe.runtime.interpreter import Machine


Weights = tuple[Sequence[Tensor], Sequence[Tensor]]
"""A stage's parameters and buffers."""


def weights(machine: Machine, stage: int, version: int) -> Weights:
    """A stage's parameters of a version, and its buffers as before the run, on this device."""
    home = machine.weights.parameters(stage, machine.step + version), machine.weights.buffers(stage)
    if machine.device not in machine.program.copies_of(stage):
        return home
    copied: Weights = machine.store.values[own_buffer("weights", stage, machine.device, version)]
    for parameter, like in zip(copied[0], home[0], strict=True):
        parameter.requires_grad_(like.requires_grad)  # not sent from one rank to another
    return copied


def turn(machine: Machine, stage: int) -> AbstractContextManager[object]:
    """A lock for leaf modules that several devices call, each with its weights put into them."""
    shared = machine.stages[stage].leaves and machine.program.copies_of(stage)
    return _TURN if shared else _NOBODY_ELSE


_TURN, _NOBODY_ELSE = RLock(), nullcontext()


def share(machine: Machine, instruction: ins.Share) -> None:
    shared = weights(machine, instruction.stage, instruction.batch)
    machine.store.values.update(dict.fromkeys(machine.program.writes(instruction), shared))


def give(machine: Machine, instruction: ins.Give) -> None:
    stage, copy, batch = instruction.stage, instruction.copy, instruction.batch
    gradients, state = machine.store.gradients.pop((stage, batch), []), machine.store.state
    names = [write.target for write in machine.stages[stage].writes]
    written = {name: state.pop(name) for name in names if name in state}
    machine.store.values[own_buffer("sums", stage, copy, batch)] = gradients, written


def add(machine: Machine, instruction: ins.Add) -> None:
    key = instruction.stage, instruction.batch
    totals = machine.store.gradients.get(key) or machine.weights.started(instruction.stage)
    state = machine.store.state
    for buffer in machine.program.reads(instruction):
        gradients, written = machine.store.values[buffer]
        totals = added(totals, gradients)
        for name, moments in written.items():  # only moments, see ``refuse_copied``
            state[name] = merged([state[name], moments]) if name in state else moments
    machine.store.gradients[key] = list(totals)
