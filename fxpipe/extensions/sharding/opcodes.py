"""Instructions of stages of whose parameters each replica has a share.

Whole weights, a shard of them, and weights on their way are resources of a stage. Of these it
always has one alone:

      gather_shards  s0         the shard goes, weights are on their way
      await_shards   s0         the weights are there
      drop_shards    s0         the weights go, the shard is there
      update_shards  s0 v0 -> v1    needs the shard
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.extensions.clipping.opcodes import Norm
from fxpipe.extensions.replicas.opcodes import (
    AllGather,
    PartialBackward,
    ReduceScatter,
    Summing,
)
from fxpipe.extensions.sharding.exchanges import (
    Gathering,
    Reduction,
    coming_sums,
    own_sums,
    shard,
    sum_in_turn,
)
from fxpipe.ir.effects import WEIGHTS, DeviceMemory, Spaces
from fxpipe.ir.opcodes.update import Update
from fxpipe.ir.task import KINDS

if TYPE_CHECKING:
    from torch import Tensor

    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine

SHARD = "shard of the weights"
COMING = "weights on their way"


@dataclass(frozen=True, slots=True)
class GatherShards(Summing):
    """Begin to gather a stage's weights from all replicas; it waits for nothing.

    Roughly: weights[stage] = [peers[of].begin(weight) for of in owners].

    Attributes:
        number: counts those of the stage in a step, from 0.
    """

    opcode = "gather_shards"
    form = f"{Summing.form[0]} number {{number}}", "s0 number 0"
    stands_for = KINDS["G"]
    before_barrier = True
    removes = (SHARD,)
    provides = (COMING,)
    number: int = 0

    def begins(self, program: Program) -> Gathering:
        return Gathering(self.stage, self.batch, self.number)

    def spaces(self, memory: DeviceMemory) -> Spaces:
        return Spaces(first=(memory.weights(self.stage),), freed=(shard(memory, self.stage),))

    def run(self, machine: Machine) -> None:
        from fxpipe.extensions.sharding.running import begin_gather

        begin_gather(machine, self.stage)


@dataclass(frozen=True, slots=True)
class AwaitShards(Summing):
    """Wait until a stage's weights are there. Roughly: weights[stage].wait().

    Attributes:
        number: that of the gather.
    """

    opcode = "await_shards"
    form = GatherShards.form
    before_barrier = True
    removes = (COMING,)
    provides = (WEIGHTS,)
    number: int = 0

    def awaits(self, program: Program) -> Gathering:
        return Gathering(self.stage, self.batch, self.number)

    def run(self, machine: Machine) -> None:
        from fxpipe.extensions.sharding.running import await_weights

        await_weights(machine, self.stage)


@dataclass(frozen=True, slots=True)
class DropShards(Summing):
    """Keep of a stage's weights only what this replica updates. Roughly: del weights[others]."""

    opcode = "drop_shards"
    stands_for = KINDS["D"]
    before_barrier = True
    takes = False
    removes = (WEIGHTS,)
    provides = (SHARD,)

    def spaces(self, memory: DeviceMemory) -> Spaces:
        return Spaces(first=(shard(memory, self.stage),), freed=(memory.weights(self.stage),))

    def run(self, machine: Machine) -> None:
        from fxpipe.extensions.sharding.running import drop_others

        drop_others(machine, self.stage)


@dataclass(frozen=True, slots=True)
class ReduceToOwners(ReduceScatter):
    """Begin to send each of a stage's gradients to the replica that updates its parameter; it waits
    for nothing. Roughly: peers[of].put(gradients[of]) for of in owners."""

    opcode = "reduce_to_owners"
    spends = "sent to be summed", "move it before that"

    def begins(self, program: Program) -> Reduction:  # type: ignore[override]
        return Reduction(self.stage, self.batch)

    def spaces(self, memory: DeviceMemory) -> Spaces:
        return Spaces(then=(coming_sums(memory, self.stage, self.batch, -1),))

    def run(self, machine: Machine) -> None:
        from fxpipe.extensions.sharding.running import begin_reduce

        gradients = machine.store.gradients.pop((self.stage, self.batch), [])
        begin_reduce(machine, self.stage, self.batch, -1, gradients)


@dataclass(frozen=True, slots=True)
class PartialToOwners(PartialBackward):
    """Run a backward until a bucket of gradients is complete, and begin to send these, each to the
    replica that updates its parameter.

    Roughly: saved, g = backward(saved, output_gradients); reduce_to_owners(gradients[bucket] + g).
    """

    opcode = "partial_to_owners"

    def begins(self, program: Program) -> Reduction:  # type: ignore[override]
        return Reduction(self.stage, self.batch, self.bucket)

    def spaces(self, memory: DeviceMemory) -> Spaces:
        return Spaces(then=(coming_sums(memory, self.stage, self.batch, self.bucket),))

    def send(self, machine: Machine, gradients: list[Tensor | None]) -> None:
        from fxpipe.extensions.sharding.running import begin_reduce

        begin_reduce(machine, self.stage, self.batch, self.bucket, gradients)


@dataclass(frozen=True, slots=True)
class AwaitSums(AllGather):
    """Wait for the gradients that this replica sums, of the parameters that it updates.

    Roughly: gradients[stage] = sum(peer.get() for each peer). It has no others from then on.
    """

    opcode = "await_sums"

    def awaits(self, program: Program) -> Reduction:  # type: ignore[override]
        return Reduction(self.stage, self.batch)

    def spaces(self, memory: DeviceMemory) -> Spaces:
        """One bucket after another is summed, and given back."""
        stage, batch = self.stage, self.batch
        buckets = range(-1, memory.program.buckets.get(stage, 1) - 1)
        came = [coming_sums(memory, stage, batch, bucket) for bucket in buckets]
        freed, summed = (memory.sums(stage, batch), *came), own_sums(memory, stage, batch)
        most = sum_in_turn(memory, stage, buckets)
        return Spaces(freed=freed, during=memory.blocks(most), then=(summed,))

    def run(self, machine: Machine) -> None:
        from fxpipe.extensions.sharding.running import await_sums

        sums = await_sums(machine, self.stage, self.batch, machine.program.buckets)
        machine.store.gradients[self.stage, self.batch] = sums


@dataclass(frozen=True, slots=True)
class ShareNorms(Norm):
    """Exchange the norms of gradients of which each replica has some, and send them to all stages.

    Roughly: norms = [peers[of].norm() for of in owners].
    """

    opcode = "share_norms"

    def run(self, machine: Machine) -> None:
        from fxpipe.extensions.sharding.running import share_norms

        Norm.run(self, machine)
        share_norms(machine, self.stage, self.makes(machine.program))


@dataclass(frozen=True, slots=True)
class UpdateShards(Update):
    """Step a stage's optimizer on this replica's shard of the weights.

    Roughly: weights[writes][own] = optimizer(weights[reads][own], gradients[own]).
    """

    opcode = "update_shards"

    @property
    def requires(self) -> Sequence[str]:
        return (SHARD,)
