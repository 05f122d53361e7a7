"""Sums of gradients over the replicas, and weights of which each replica updates some."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fxpipe.extensions.replicas.exchanges import NewWeights, Sum, arriving, share
from fxpipe.ir.effects import DeviceMemory, Spaces
from fxpipe.ir.opcodes.backward import (
    Backward,
    WeightGrad,
    left,
    output_gradients,
    reads,
)
from fxpipe.ir.opcodes.base import Compute, Instruction, OncePerStep, Wrong
from fxpipe.ir.task import TaskKind
from fxpipe.ir.value import Buffer

if TYPE_CHECKING:
    from torch import Tensor

    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine

ONE_REPLICA = "the program has one replica", "remove it, or give the number of replicas"


class Summing(OncePerStep):
    """Base of the instructions that sum gradients over the replicas, or gather weights."""

    __slots__ = ()

    def wrong(self, program: Program, device: int) -> Wrong | None:
        return ONE_REPLICA if program.replicas == 1 else None


class _OfGradients(Summing):
    __slots__ = ()
    before_barrier = True

    @classmethod
    def of_every_stage(cls, program: Program, there: Container[str]) -> bool:
        trains = any(letter in there for letter in "BI")
        return program.replicas > 1 and (trains or "A" in there)


@dataclass(frozen=True, slots=True)
class ReduceScatter(_OfGradients):
    """Begin to sum the rest of a stage's gradients over the replicas; it waits for nothing.

    Each replica sums one part. Roughly: peers[r].put(part) for r, part in parts(gradients).
    """

    opcode = "reduce_scatter"
    task = "A"
    spends = "sent to be summed", "move it before that, or behind the stage's all_gather"

    def begins(self, program: Program) -> Sum:
        return Sum(self.stage, self.batch)

    def spaces(self, memory: DeviceMemory) -> Spaces:
        return Spaces(then=(arriving(memory, self.stage, self.batch, -1),))

    def run(self, machine: Machine) -> None:
        gradients = machine.store.gradients.pop((self.stage, self.batch), [])
        batch, replicas = machine.step + self.batch, machine.channels.replicas
        replicas.reduce_scatter(machine, self.stage, batch, gradients, -1)


@dataclass(frozen=True, slots=True)
class AllGather(_OfGradients):
    """Wait for the sums of all replicas. Roughly: gradients[stage] = [peer.sum() for each peer].

    From then on the sums are the stage's gradients.
    """

    opcode = "all_gather"
    stands_for = TaskKind("gather", "all_gather", per_microbatch=False, follows="A")
    sums = True
    restores = "A"

    def awaits(self, program: Program) -> Sum:
        return Sum(self.stage, self.batch)

    def spaces(self, memory: DeviceMemory) -> Spaces:
        """This replica's part replaces the sums; those of all arrive, and are joined."""
        stage, batch = self.stage, self.batch
        sums, part = memory.sums(stage, batch), share(memory, stage, batch)
        buckets = range(-1, memory.program.buckets.get(stage, 1) - 1)
        came = [arriving(memory, stage, batch, bucket) for bucket in buckets]
        more = 2 * memory.sizes.gradients.get(stage, 0)
        return Spaces((part,), (sums, *came), more, (sums,), (part,))

    def run(self, machine: Machine) -> None:
        buckets = machine.program.buckets.get(self.stage, 1)
        sums = machine.channels.replicas.all_gather(self.stage, machine.step + self.batch, buckets)
        machine.store.gradients[self.stage, self.batch] = sums


@dataclass(frozen=True, slots=True)
class GatherWeights(Summing):
    """Exchange new weights: each replica has updated some. Roughly: weights[batch + 1] =
    [peers[of].weight() for of in owners].

    It comes right behind the update, and waits for the other replicas.
    """

    opcode = "gather_weights"
    stands_for = TaskKind("weights", "gather_weights", per_microbatch=False, follows="U")
    completes = True

    @classmethod
    def of_every_stage(cls, program: Program, there: Container[str]) -> bool:
        return "weights" in there

    def begins(self, program: Program) -> NewWeights:
        return NewWeights(self.stage, self.batch)

    def awaits(self, program: Program) -> NewWeights:
        return NewWeights(self.stage, self.batch)

    def run(self, machine: Machine) -> None:
        names = [argument.target for argument in machine.stages[self.stage].parameters]
        parameters = machine.weights.parameters(self.stage, machine.step + self.batch + 1)
        machine.channels.replicas.gather_weights(names, parameters)


@dataclass(frozen=True, slots=True)
class PartialBackward(Compute):
    """Run a backward until a bucket of gradients is complete, and begin to sum that.

    Roughly: saved, g = backward(saved, output_gradients); reduce_scatter(gradients[bucket] + g).
    It is part of the RestOfBackward or RestOfWeightGrad that follows it, which completes the last
    bucket.

    Attributes:
        kind: "B" for a part of a Backward, "W" for a part of a WeightGrad.
        bucket: the bucket, from 0.
    """

    opcode = "partial_backward"
    partial = True
    adds = True
    form = f"{{kind:word}} {Compute.form[0]} bucket {{bucket}}", "B s0[0] v0 bucket 0"
    kind: str = "B"
    bucket: int = 0

    @property
    def letter(self) -> str:
        return self.kind

    def begins(self, program: Program) -> Sum:
        return Sum(self.stage, self.batch, self.bucket)

    def spaces(self, memory: DeviceMemory) -> Spaces:
        return Spaces(then=(arriving(memory, self.stage, self.batch, self.bucket),))

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        return reads(self, program) if self.kind != "W" else left(self, program)

    def wrong(self, program: Program, device: int) -> Wrong | None:
        if program.replicas == 1:
            return ONE_REPLICA
        if self.kind not in ("B", "W"):
            cure = "write B for a whole one, W for its second half"
            return f"there is no backward {self.kind!r}", cure
        if not 0 <= self.stage < program.stages or program.placement[self.stage] != device:
            return f"stage {self.stage} is not on device {device}", "name one that is"
        return None

    def then(self, x: Instruction) -> str:
        rest = rest_of(self.kind)(self.stage, self.microbatch, self.version, self.batch)
        follows = x in (replace(self, bucket=self.bucket + 1), rest)
        return "" if follows else "let the rest of that backward come before it"

    def behind(self, before: Instruction | None) -> Wrong | None:
        if self.bucket and not (before and before.partial):
            return f"there is no bucket {self.bucket - 1} before it", "begin with bucket 0"
        return None

    def run(self, machine: Machine) -> None:
        stage, i, batch = self.stage, self.microbatch, self.batch
        kind, bucket, store = self.kind, self.bucket, machine.store
        kept = machine.program.operands[stage, i, batch].kept
        buffer = kept if kind == "B" else self.own("deferred")
        left = store.values[buffer]
        if kind == "B" and bucket == 0:
            left += output_gradients(machine, self)
        part = machine.kernel(stage, i, batch).partial_backward
        store.values[buffer], sums = part(kind, bucket, left, machine.totals(self))
        complete: list[Tensor | None] = [None] * len(sums)
        for index in machine.stages[stage].buckets[bucket]:
            complete[index], sums[index] = sums[index], None
        store.gradients[stage, batch] = sums
        self.send(machine, complete)

    def send(self, machine: Machine, gradients: list[Tensor | None]) -> None:
        """Begin to sum the gradients of its bucket, which are complete."""
        batch, replicas = machine.step + self.batch, machine.channels.replicas
        replicas.reduce_scatter(machine, self.stage, batch, gradients, self.bucket)


class _Rest(Compute):
    """The rest of a backward, behind the parts of it that have run up to the last bucket."""

    __slots__ = ()
    rest = True

    def then(self, x: Instruction) -> str:
        return "" if x.task == "A" else "let the stage's reduce_scatter come before it"

    def behind(self, before: Instruction | None) -> Wrong | None:
        if before and before.partial:
            return None
        return "no partial backward has begun it", "write the whole one"

    def run(self, machine: Machine) -> None:
        stage, i, batch = self.stage, self.microbatch, self.batch
        (buffer,) = self.ends(machine.program)
        kernel, left = machine.kernel(stage, i, batch), machine.store.take(buffer)
        inputs, sums = kernel.partial_backward(self.task or "", -1, left, machine.totals(self))
        machine.store.gradients[stage, batch] = sums
        if self.task == "B":
            machine.store.hand_out(machine.program.operands[stage, i, batch].returned, inputs)


@dataclass(frozen=True, slots=True)
class RestOfBackward(_Rest, Backward):
    """Run the rest of a backward, behind the parts of it, and add to its stage's gradients."""

    opcode = "rest_backward"


@dataclass(frozen=True, slots=True)
class RestOfWeightGrad(_Rest, WeightGrad):
    """Run the rest of the second half of a backward, and add to its stage's gradients."""

    opcode = "rest_weight_grad"


def rest_of(kind: str) -> type[RestOfBackward] | type[RestOfWeightGrad]:
    """What runs the rest of a backward of that kind, "B" or "W"."""
    return RestOfBackward if kind == "B" else RestOfWeightGrad
