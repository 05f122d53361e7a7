"""What replicas send each other where each has a share of a stage's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from fxpipe.extensions.exchange import Exchange, StageBytes
from fxpipe.extensions.replicas.exchanges import shares
from fxpipe.ir.effects import DeviceMemory, Piece

if TYPE_CHECKING:
    from fxpipe.ir.program import Program


@dataclass(frozen=True, order=True)
class Reduction(Exchange):
    """The gradients of a stage, or a bucket of them, each to the replica that has its parameter."""

    what = "gradients"

    def sent(self, sizes: StageBytes, replica: int, program: Program) -> int:
        every = _gradients(sizes, self.stage, program.replicas, self.bucket)
        return sum(every) - every[replica]

    def most(self, sizes: StageBytes, program: Program) -> int:
        every = _gradients(sizes, self.stage, program.replicas, self.bucket)
        return sum(every) - min(every)


@dataclass(frozen=True, order=True)
class Gathering(Exchange):
    """A stage's weights, from each replica its share to all others.

    A stage gathers several times a step: ``bucket`` counts these.
    """

    what = "weights"
    of = ("parameters",)

    def sent(self, sizes: StageBytes, replica: int, program: Program) -> int:
        return (program.replicas - 1) * _weights(sizes, self.stage, program.replicas)[replica]

    def most(self, sizes: StageBytes, program: Program) -> int:
        return (program.replicas - 1) * max(_weights(sizes, self.stage, program.replicas))

    def __str__(self) -> str:
        return f"{self.what}:{self.stage}[{self.batch}] {self.bucket}"


def shard(memory: DeviceMemory, stage: int) -> Piece:
    """The share of a stage's weights of the replica that has the most."""
    size = max(_weights(memory.sizes, stage, memory.program.replicas))
    return Piece("parameters", ("shard", stage), memory.blocks(size))


def own_sums(memory: DeviceMemory, stage: int, batch: int) -> Piece:
    """The sums of the gradients of that share, in place of those of all."""
    size = max(_gradients(memory.sizes, stage, memory.program.replicas))
    return memory.sums(stage, batch)._replace(bytes=memory.blocks(size))


def coming_sums(memory: DeviceMemory, stage: int, batch: int, bucket: int) -> Piece:
    """What comes of a bucket from all replicas for that share."""
    sizes, replicas = memory.sizes, memory.program.replicas
    weights = _weights(sizes, stage, replicas)
    own = _gradients(sizes, stage, replicas, bucket)[weights.index(max(weights))]
    return Piece("gradients", ("arriving", stage, batch, bucket), memory.blocks(replicas * own))


def sum_in_turn(memory: DeviceMemory, stage: int, buckets: Sequence[int]) -> int:
    """The most bytes that a stage's gradients and what has come take while they are summed bucket
    by bucket."""
    replicas, found = memory.program.replicas, list[int]()
    each = [_gradients(memory.sizes, stage, replicas, bucket) for bucket in buckets]
    for own in zip(*each, strict=True):
        there = [sum(given) + replicas * part for given, part in zip(each, own, strict=True)]
        summed = [*accumulate(own)]
        found += [sum(there[at:]) + summed[at] for at in range(len(own))]
    return max(found)


def _each(sizes: StageBytes, stage: int) -> list[int]:
    """The bytes of each parameter of a stage; without them, all are one."""
    return [*sizes.each.get(stage, (sizes.parameters.get(stage, 0),))]


def _weights(sizes: StageBytes, stage: int, replicas: int) -> Sequence[int]:
    """Replica → the bytes of its share of a stage's weights."""
    return shares(_each(sizes, stage), replicas)


def _gradients(
    sizes: StageBytes, stage: int, replicas: int, bucket: int | None = None
) -> Sequence[int]:
    """Replica → the bytes of the gradients of its share, or of those in a bucket."""
    whole = sizes.elements.get(stage, [(sizes.gradients.get(stage, 0), 1)])
    each = [count * size for count, size in whole]
    by = sizes.each.get(stage, ()) if stage in sizes.elements else ()
    if bucket is not None and (buckets := sizes.buckets.get(stage)):
        by = by or each
        each = [size if at in buckets[bucket] else 0 for at, size in enumerate(each)]
    return shares(each, replicas, by)
