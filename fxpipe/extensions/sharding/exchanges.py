"""What replicas send each other where each has a share of a stage's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.extensions.exchange import Exchange, StageBytes
from fxpipe.extensions.replicas.exchanges import shares
from fxpipe.ir.effects import DeviceMemory, Piece

if TYPE_CHECKING:
    from fxpipe.ir.program import Program


@dataclass(frozen=True, order=True)
class Reduction(Exchange):
    """The gradients of a stage, each to the replica that has its parameter."""

    what = "gradients"

    def sent(self, sizes: StageBytes, replica: int, program: Program) -> int:
        every = _gradients(sizes, self.stage, program.replicas)
        return sum(every) - every[replica]

    def most(self, sizes: StageBytes, program: Program) -> int:
        every = _gradients(sizes, self.stage, program.replicas)
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


def coming_sums(memory: DeviceMemory, stage: int, batch: int) -> Piece:
    """What comes from all replicas for that share."""
    replicas = memory.program.replicas
    size = replicas * max(_gradients(memory.sizes, stage, replicas))
    return Piece("gradients", ("arriving", stage, batch, -1), memory.blocks(size))


def _each(sizes: StageBytes, stage: int) -> list[int]:
    """The bytes of each parameter of a stage; without them, all are one."""
    return [*sizes.each.get(stage, (sizes.parameters.get(stage, 0),))]


def _weights(sizes: StageBytes, stage: int, replicas: int) -> Sequence[int]:
    """Replica → the bytes of its share of a stage's weights."""
    return shares(_each(sizes, stage), replicas)


def _gradients(sizes: StageBytes, stage: int, replicas: int) -> Sequence[int]:
    """Replica → the bytes of the gradients of its share."""
    whole = sizes.elements.get(stage, [(sizes.gradients.get(stage, 0), 1)])
    by = sizes.each.get(stage, ()) if stage in sizes.elements else ()
    return shares([count * size for count, size in whole], replicas, by)
