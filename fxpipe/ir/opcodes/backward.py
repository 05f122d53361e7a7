"""A stage's backward: whole and in halves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, ClassVar

from fxpipe.ir.opcodes.base import Compute
from fxpipe.ir.value import Buffer

if TYPE_CHECKING:
    from torch import Tensor

    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine


@dataclass(frozen=True, slots=True)
class Backward(Compute):
    """Run a stage's backward graph, which uses up ``saved``, and add to its gradients.

    Roughly: input_gradients, g = backward(saved, output_gradients); gradients[stage] += g.
    """

    opcode = "backward"
    task = "B"
    sums = True
    adds = True

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        return reads(self, program)

    def makes(self, program: Program) -> tuple[Buffer, ...]:
        return (*chain(*program.operands_of(self).returned),)

    def ends(self, program: Program) -> tuple[Buffer, ...]:
        return (program.operands_of(self).kept,)

    def run(self, machine: Machine) -> None:
        stage, i, batch = self.stage, self.microbatch, self.batch
        operands, store = machine.program.operands[stage, i, batch], machine.store
        kept = store.take(operands.kept)
        kernel, totals = machine.kernel(stage, i, batch), machine.totals(self)
        inputs, sums = kernel.backward(kept, output_gradients(machine, self), totals)
        store.gradients[stage, batch] = sums
        store.hand_out(operands.returned, inputs)


@dataclass(frozen=True, slots=True)
class InputGrad(Compute):
    """Run the half of a backward that other stages wait for; it uses up ``saved``.

    Roughly: input_gradients, deferred = input_grad(saved, output_gradients).

    Attributes:
        frozen: whether the other half is left out, so that nothing is deferred.
    """

    opcode = "input_grad"
    flags: ClassVar = {"frozen": "frozen"}
    task = "I"
    sums = True
    frozen: bool = False

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        return reads(self, program)

    def makes(self, program: Program) -> tuple[Buffer, ...]:
        deferred = () if self.frozen else (self.own("deferred"),)
        return (*deferred, *chain(*program.operands_of(self).returned))

    def ends(self, program: Program) -> tuple[Buffer, ...]:
        return (program.operands_of(self).kept,)

    def run(self, machine: Machine) -> None:
        stage, i, batch = self.stage, self.microbatch, self.batch
        operands, values = machine.program.operands[stage, i, batch], machine.store.values
        # counts as kept until the weight gradient, if there is one
        kept = machine.store.take(operands.kept) if self.frozen else values.pop(operands.kept)
        kernel = machine.kernel(stage, i, batch)
        result = kernel.input_grad(kept, output_gradients(machine, self))
        machine.store.hand_out(operands.returned, result.inputs)
        if not self.frozen:
            values[self.own("deferred")] = result.deferred
            return
        sums = list(machine.totals(self)) or [None] * len(machine.stages[stage].parameters)
        machine.store.gradients[stage, batch] = sums


@dataclass(frozen=True, slots=True)
class WeightGrad(Compute):
    """Run the other half of a backward; it uses up ``deferred``.

    Roughly: gradients[stage] += weight_grad(deferred).
    """

    opcode = "weight_grad"
    task = "W"
    sums = True
    adds = True

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        return left(self, program)

    def ends(self, program: Program) -> tuple[Buffer, ...]:
        return (self.own("deferred"),)

    def run(self, machine: Machine) -> None:
        stage, i, batch = self.stage, self.microbatch, self.batch
        left = machine.store.take(self.own("deferred"))
        kernel = machine.kernel(stage, i, batch)
        machine.store.gradients[stage, batch] = kernel.weight_grad(left, machine.totals(self))


def reads(x: Compute, program: Program) -> tuple[Buffer, ...]:
    """What a backward reads."""
    operands = program.operands_of(x)
    return (*program.weights_of(x), operands.kept, *chain(*operands.gradients))


def left(x: Compute, program: Program) -> tuple[Buffer, ...]:
    """What the second half of a backward reads."""
    return (*program.weights_of(x), x.own("deferred"))


def output_gradients(machine: Machine, x: Compute) -> list[Tensor]:
    """For each output of the stage that gets a gradient: the sum over its consumers."""
    groups = machine.program.operands[x.stage, x.microbatch, x.batch].gradients
    values = machine.store.values
    return [reduce(add, [values[buffer] for buffer in group]) for group in groups]
