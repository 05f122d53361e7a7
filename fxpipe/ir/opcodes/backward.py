"""A stage's backward: whole, in halves, and in parts that end with a bucket of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, ClassVar

from fxpipe.ir.opcodes.base import Compute, Wrong
from fxpipe.ir.opcodes.summing import ONE_REPLICA
from fxpipe.ir.value import Buffer

if TYPE_CHECKING:
    from torch import Tensor

    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine


class _Adding(Compute):
    """What adds to a stage's gradients."""

    __slots__ = ()

    def lasting(self) -> tuple[str, str]:
        return "weights", "gradients"


@dataclass(frozen=True, slots=True)
class Backward(_Adding):
    """Run a stage's backward graph, which uses up ``saved``, and add to its gradients.

    Roughly: input_gradients, g = backward(saved, output_gradients); gradients[stage] += g.

    Attributes:
        rest: whether partial backwards have run up to the last bucket, so that only that is left.
    """

    opcode = "backward"
    flags: ClassVar = {"rest": "rest"}
    task = "B"
    rest: bool = False

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        return _reads(self, program)

    def makes(self, program: Program) -> tuple[Buffer, ...]:
        return program.operands_of(self).returned

    def ends(self, program: Program) -> tuple[Buffer, ...]:
        return (program.operands_of(self).kept,)

    def run(self, machine: Machine) -> None:
        stage, i, batch = self.stage, self.microbatch, self.batch
        operands, store = machine.program.operands[stage, i, batch], machine.store
        kept = store.take(operands.kept)
        kernel, totals = machine.kernel(stage, i, batch), machine.totals(self)
        if self.rest:
            inputs, sums = kernel.partial_backward("B", -1, kept, totals)
        else:
            inputs, sums = kernel.backward(kept, _output_gradients(machine, self), totals)
        store.gradients[stage, batch] = sums
        store.values.update(zip(operands.returned, inputs, strict=True))


@dataclass(frozen=True, slots=True)
class PartialBackward(_Adding):
    """Run a backward until a bucket of gradients is complete, and begin to sum that.

    Roughly: saved, g = backward(saved, output_gradients); reduce_scatter(gradients[bucket] + g).
    It is part of the Backward or WeightGrad that follows it, which completes the last bucket.

    Attributes:
        kind: "B" for a part of a Backward, "W" for a part of a WeightGrad.
        bucket: the bucket, from 0.
    """

    opcode = "partial_backward"
    form = f"{{kind:word}} {Compute.form[0]} bucket {{bucket}}", "B s0[0] v0 bucket 0"
    kind: str = "B"
    bucket: int = 0

    @property
    def letter(self) -> str:
        return self.kind

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        return _reads(self, program) if self.kind != "W" else _left(self, program)

    def wrong(self, program: Program, device: int) -> Wrong | None:
        if program.replicas == 1:
            return ONE_REPLICA
        if self.kind not in ("B", "W"):
            cure = "write B for a whole one, W for its second half"
            return f"there is no backward {self.kind!r}", cure
        if not 0 <= self.stage < program.stages or program.placement[self.stage] != device:
            return f"stage {self.stage} is not on device {device}", "name one that is"
        return None

    def run(self, machine: Machine) -> None:
        stage, i, batch = self.stage, self.microbatch, self.batch
        kind, bucket, store = self.kind, self.bucket, machine.store
        kept = machine.program.operands[stage, i, batch].kept
        buffer = kept if kind == "B" else self.own("deferred")
        left = store.values[buffer]
        if kind == "B" and bucket == 0:
            left += _output_gradients(machine, self)
        kernel, totals = machine.kernel(stage, i, batch), machine.totals(self)
        store.values[buffer], sums = kernel.partial_backward(kind, bucket, left, totals)
        complete: list[Tensor | None] = [None] * len(sums)
        for index in machine.stages[stage].buckets[bucket].parameters:
            complete[index], sums[index] = sums[index], None
        store.gradients[stage, batch] = sums
        machine.replicas.reduce_scatter(stage, machine.step + batch, complete, bucket)


@dataclass(frozen=True, slots=True)
class InputGrad(Compute):
    """Run the half of a backward that other stages wait for; it uses up ``saved``.

    Roughly: input_gradients, deferred = input_grad(saved, output_gradients).
    """

    opcode = "input_grad"
    task = "I"

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        return _reads(self, program)

    def makes(self, program: Program) -> tuple[Buffer, ...]:
        return (self.own("deferred"), *program.operands_of(self).returned)

    def ends(self, program: Program) -> tuple[Buffer, ...]:
        return (program.operands_of(self).kept,)

    def run(self, machine: Machine) -> None:
        stage, i, batch = self.stage, self.microbatch, self.batch
        operands, values = machine.program.operands[stage, i, batch], machine.store.values
        kept = values.pop(operands.kept)  # counts as kept until the weight gradient
        kernel = machine.kernel(stage, i, batch)
        result = kernel.input_grad(kept, _output_gradients(machine, self))
        values.update(zip(operands.returned, result.inputs, strict=True))
        values[self.own("deferred")] = result.deferred


@dataclass(frozen=True, slots=True)
class WeightGrad(_Adding):
    """Run the other half of a backward; it uses up ``deferred``.

    Roughly: gradients[stage] += weight_grad(deferred).

    Attributes:
        rest: as in Backward.
    """

    opcode = "weight_grad"
    flags: ClassVar = {"rest": "rest"}
    task = "W"
    rest: bool = False

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        return _left(self, program)

    def ends(self, program: Program) -> tuple[Buffer, ...]:
        return (self.own("deferred"),)

    def run(self, machine: Machine) -> None:
        stage, i, batch = self.stage, self.microbatch, self.batch
        left = machine.store.take(self.own("deferred"))
        kernel, totals = machine.kernel(stage, i, batch), machine.totals(self)
        if self.rest:
            _, sums = kernel.partial_backward("W", -1, left, totals)
        else:
            sums = kernel.weight_grad(left, totals)
        machine.store.gradients[stage, batch] = sums


def _reads(x: Compute, program: Program) -> tuple[Buffer, ...]:
    operands = program.operands_of(x)
    return (*program.weights_of(x), operands.kept, *chain(*operands.gradients))


def _left(x: Compute, program: Program) -> tuple[Buffer, ...]:
    return (*program.weights_of(x), x.own("deferred"))


def _output_gradients(machine: Machine, x: Compute) -> list[Tensor]:
    """For each output of the stage that gets a gradient: the sum over its consumers."""
    groups = machine.program.operands[x.stage, x.microbatch, x.batch].gradients
    values = machine.store.values
    return [reduce(add, [values[buffer] for buffer in group]) for group in groups]
