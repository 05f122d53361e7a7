"""Sums of gradients over the replicas, and weights that each replica updates a part of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.ir.opcodes.base import Mark, OncePerStep, Wrong
from fxpipe.ir.task import TaskKind

if TYPE_CHECKING:
    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine

ONE_REPLICA = "the program has one replica", "remove it, or give the number of replicas"


class Summing(OncePerStep):
    """Base of the instructions that sum gradients over the replicas, or gather weights."""

    __slots__ = ()

    def lasting(self) -> tuple[str, str]:
        return "", "gradients"

    def wrong(self, program: Program, device: int) -> Wrong | None:
        return ONE_REPLICA if program.replicas == 1 else None


@dataclass(frozen=True, slots=True)
class ReduceScatter(Summing):
    """Begin to sum the rest of a stage's gradients over the replicas; it waits for nothing.

    Each replica sums one part. Roughly: peers[r].put(part) for r, part in parts(gradients).
    """

    opcode = "reduce_scatter"
    task = "A"

    def run(self, machine: Machine) -> None:
        gradients = machine.store.gradients.pop((self.stage, self.batch), [])
        machine.replicas.reduce_scatter(self.stage, machine.step + self.batch, gradients, -1)


class _Taking(Summing):
    __slots__ = ()

    def run(self, machine: Machine) -> None:
        take, count = getattr(machine.replicas, self.opcode), machine.program.buckets
        sums = take(self.stage, machine.step + self.batch, count.get(self.stage, 1))
        machine.store.gradients[self.stage, self.batch] = sums


@dataclass(frozen=True, slots=True)
class AllGather(_Taking):
    """Wait for the sums of all replicas. Roughly: gradients[stage] = [peer.sum() for each peer].

    From then on the sums are the stage's gradients.
    """

    opcode = "all_gather"
    stands_for = TaskKind("gather", "all_gather", per_microbatch=False, follows="A")
    mark = Mark("g", border="gradient")


@dataclass(frozen=True, slots=True)
class TakePart(_Taking):
    """Wait for this replica's part of the sums. Roughly: gradients[stage] = self.sum().

    From then on it is the stage's gradients: all that the replica needs with sharded optimizers.
    """

    opcode = "take_part"
    stands_for = TaskKind("part", "take_part", per_microbatch=False, follows="A")
    mark = Mark("t", border="gradient")


@dataclass(frozen=True, slots=True)
class GatherWeights(Summing):
    """Wait for all parts of new weights. Roughly: weights[batch + 1] = [part() for each peer].

    The update of ``batch`` on each replica has made its part and sent it.
    """

    opcode = "gather_weights"
    stands_for = TaskKind("weights", "gather_weights", per_microbatch=False, follows="U")
    mark = Mark("w", "parameter", "paper")

    def lasting(self) -> tuple[str, str]:
        return "", "weights"

    def run(self, machine: Machine) -> None:
        batch = machine.step + self.batch
        parts = machine.replicas.gather_weights(self.stage, batch)
        machine.weights.gather(self.stage, batch + 1, parts)
