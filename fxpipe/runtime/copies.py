"""What a stage's own device and its copies on other devices give each other, once a step.

The weights and buffers are those of the stage's own device. A copy gets them at the begin of the
step, and gives back the gradients that it has summed over its micro-batches, and the moments of its
BatchNorms; the stage's own device adds them to its own, those of the first copy first, and alone
updates. So nothing can part the copies, and all that lasts from step to step, such as optimizers,
checkpoints and the model itself where a rank has a copy, knows of none.
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
    """A stage's parameters and buffers as they were before the run, of its own device."""
    own = machine.weights.parameters(stage, machine.step + version), machine.weights.buffers(stage)
    if machine.device not in machine.program.copies_of(stage):
        return own
    given: Weights = machine.store.values[own_buffer("weights", stage, machine.device, version)]
    for parameter, like in zip(given[0], own[0], strict=True):
        parameter.requires_grad_(like.requires_grad)  # what comes from another rank has none
    return given


def turn(machine: Machine, stage: int) -> AbstractContextManager[object]:
    """Held while leaf modules run that several devices call: a call shows them its own weights."""
    shared = machine.stages[stage].leaves and machine.program.copies_of(stage)
    return _TURN if shared else _NOBODY_ELSE


_TURN, _NOBODY_ELSE = RLock(), nullcontext()


def share(machine: Machine, instruction: ins.Share) -> None:
    given = weights(machine, instruction.stage, instruction.batch)
    for buffer in machine.program.writes(instruction):
        machine.store.values[buffer] = given


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
        for name, more in written.items():  # only moments, see ``refuse_copied``
            state[name] = merged([state[name], more]) if name in state else more
    machine.store.gradients[key] = list(totals)
