"""What replicas send each other where each has a share of a stage's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from fxpipe.extensions.exchange import Exchange, StageBytes
from fxpipe.extensions.replicas.exchanges import fullest, gradient_shares, shares
from fxpipe.ir.effects import DeviceMemory, Piece

if TYPE_CHECKING:
    from fxpipe.ir.program import Program


@dataclass(frozen=True, order=True)
class Reduction(Exchange):
    """The gradients of a stage, or a bucket of them, each to the replica that has its parameter."""

    what = "gradients"

    def sent(self, sizes: StageBytes, replica: int, program: Program) -> int:
        every = gradient_shares(sizes, self.stage, program, self.bucket)
        return sum(every) - every[replica]

    def most(self, sizes: StageBytes, program: Program) -> int:
        every = gradient_shares(sizes, self.stage, program, self.bucket)
        return sum(every) - min(every)


@dataclass(frozen=True, order=True)
class Gathering(Exchange):
    """A stage's weights, from each replica its share to all others.

    A stage gathers several times a step: ``bucket`` counts these.
    """

    what = "weights"
    of = ("parameters",)

    def sent(self, sizes: StageBytes, replica: int, program: Program) -> int:
        return (program.replicas - 1) * shares(sizes, self.stage, program)[replica]

    def most(self, sizes: StageBytes, program: Program) -> int:
        return (program.replicas - 1) * max(shares(sizes, self.stage, program))

    def __str__(self) -> str:
        return f"{self.what}:{self.stage}[{self.batch}] {self.bucket}"


def shard(memory: DeviceMemory, stage: int) -> Piece:
    """The share of a stage's weights of the replica that has the most of the device."""
    of = fullest(memory.sizes, stage, memory.program)
    size = shares(memory.sizes, stage, memory.program)[of]
    return Piece("parameters", ("shard", stage), memory.blocks(size))


def own_sums(memory: DeviceMemory, stage: int, batch: int) -> Piece:
    """The sums of the gradients of that share, in place of those of all."""
    of = fullest(memory.sizes, stage, memory.program)
    size = gradient_shares(memory.sizes, stage, memory.program)[of]
    return memory.sums(stage, batch)._replace(bytes=memory.blocks(size))


def coming_sums(memory: DeviceMemory, stage: int, batch: int, bucket: int) -> Piece:
    """What comes of a bucket from all replicas for that share."""
    of = fullest(memory.sizes, stage, memory.program)
    own = gradient_shares(memory.sizes, stage, memory.program, bucket)[of]
    size = memory.blocks(memory.program.replicas * own)
    return Piece("gradients", ("arriving", stage, batch, bucket), size)


def sum_in_turn(memory: DeviceMemory, stage: int, buckets: Sequence[int]) -> int:
    """The most bytes that a stage's gradients and what has come take while they are summed bucket
    by bucket."""
    replicas, found = memory.program.replicas, list[int]()
    each = [gradient_shares(memory.sizes, stage, memory.program, bucket) for bucket in buckets]
    for own in zip(*each, strict=True):
        there = [sum(given) + replicas * part for given, part in zip(each, own, strict=True)]
        summed = [*accumulate(own)]
        found += [sum(there[at:]) + summed[at] for at in range(len(own))]
    return max(found)
