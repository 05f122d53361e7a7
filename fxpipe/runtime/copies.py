"""What a stage's own device and its copies on other devices give each other, once a step.

The weights are those of the stage's own device. A copy gets them at the begin of the step, and
gives back the gradients that it has summed over its micro-batches; the stage's own device adds them
to its own, those of the first copy first, and alone updates. So nothing can part the copies, and
all that lasts from step to step, such as optimizers and checkpoints, knows of no copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import TYPE_CHECKING

from torch import Tensor

from fxpipe.ir import instruction as ins
from fxpipe.ir.value import sums_buffer, weights_buffer
from fxpipe.kernels.graph import added

if TYPE_CHECKING:
    from fxpipe.runtime.interpreter import Machine


def weights(machine: Machine, stage: int, batch: int) -> Sequence[Tensor]:
    """A stage's weights on a device that has a copy of it; none on its own device."""
    if machine.device not in machine.program.copies_of(stage):
        return ()
    given: Sequence[Tensor] = machine.store.values[weights_buffer(stage, machine.device, batch)]
    return given


def turn(machine: Machine, stage: int) -> AbstractContextManager[object]:
    """Held while leaf modules run that several devices call: a call shows them its own weights."""
    shared = machine.stages[stage].leaves and machine.program.copies_of(stage)
    return _TURN if shared else _NOBODY_ELSE


_TURN, _NOBODY_ELSE = RLock(), nullcontext()


def share(machine: Machine, instruction: ins.Share) -> None:
    given = machine.weights.parameters(instruction.stage, machine.step + instruction.batch)
    for buffer in machine.program.writes(instruction):
        machine.store.values[buffer] = given


def give(machine: Machine, instruction: ins.Give) -> None:
    stage, copy, batch = instruction.stage, instruction.copy, instruction.batch
    gradients = machine.store.gradients.pop((stage, batch), [])
    machine.store.values[sums_buffer(stage, copy, batch)] = gradients


def add(machine: Machine, instruction: ins.Add) -> None:
    key = instruction.stage, instruction.batch
    totals = machine.store.gradients.get(key) or machine.weights.started(instruction.stage)
    for buffer in machine.program.reads(instruction):
        totals = added(totals, machine.store.values[buffer])
    machine.store.gradients[key] = list(totals)
