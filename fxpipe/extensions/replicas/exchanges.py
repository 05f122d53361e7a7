"""What replicas send each other, and which of them has which part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING

from fxpipe.extensions.exchange import Exchange, StageBytes
from fxpipe.ir.effects import DeviceMemory, Piece

if TYPE_CHECKING:
    from fxpipe.ir.program import Program


@dataclass(frozen=True, order=True)
class Sum(Exchange):
    """The gradients of a stage, or a bucket of them: to each replica its part, and then the sums of
    that part to all."""

    ways = 2

    def sent(self, sizes: StageBytes, replica: int, program: Program) -> int:
        replicas, bucket = program.replicas, bucket_of(self.stage, self.bucket, program)
        part = sizes.part(self.stage, replica, replicas, bucket)
        return sizes.part(self.stage, 0, 1, bucket) + (replicas - 2) * part


@dataclass(frozen=True, order=True)
class NewWeights(Exchange):
    """A stage's new weights: each trained parameter from the replica that has updated it."""

    what = "weights"

    def sent(self, sizes: StageBytes, replica: int, program: Program) -> int:
        return (program.replicas - 1) * self._shares(sizes, program)[replica]

    def most(self, sizes: StageBytes, program: Program) -> int:
        return (program.replicas - 1) * max(self._shares(sizes, program))

    def _shares(self, sizes: StageBytes, program: Program) -> Sequence[int]:
        whole = sizes.elements.get(self.stage, [(sizes.gradients.get(self.stage, 0), 1)])
        by = sizes.each.get(self.stage, ()) if self.stage in sizes.elements else ()
        return shares([count * size for count, size in whole], program.replicas, by)


def bucket_of(stage: int, bucket: int, program: Program) -> int | None:
    """Which bucket of a stage's gradients is meant; None for all gradients of the stage."""
    return bucket if stage in program.buckets else None


def share(memory: DeviceMemory, stage: int, batch: int) -> Piece:
    """The part of a stage's sums that this replica sums: the smallest is the last one's."""
    replicas = memory.program.replicas
    size = memory.blocks(memory.sizes.part(stage, replicas - 1, replicas))
    return Piece("gradients", ("part", stage, batch), size)


def arriving(memory: DeviceMemory, stage: int, batch: int, bucket: int) -> Piece:
    """What comes of a bucket from all replicas: their contributions to this one's part."""
    of = bucket_of(stage, bucket, memory.program)
    size = memory.blocks(memory.sizes.part(stage, 0, 1, of))
    return Piece("gradients", ("arriving", stage, batch, bucket), size)


def part_of(count: int, replica: int, replicas: int) -> range:
    """The elements that one replica sums for all, of the ``count`` of all gradients of one data
    type."""
    row = -(-count // replicas)
    return range(min(row * replica, count), min(row * (replica + 1), count))


def owners(sizes: Sequence[int], replicas: int) -> list[int]:
    """Which replica updates each of a stage's parameters, if each updates some for all: the largest
    first, each by the replica that has the fewest bytes so far."""
    found, loads = [0] * len(sizes), [(0, owner) for owner in range(replicas)]
    heapify(loads)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, found[index] = loads[0]
        heapreplace(loads, (load + sizes[index], found[index]))
    return found


def shares(sizes: Sequence[int], replicas: int, by: Sequence[int] = ()) -> Sequence[int]:
    """Replica → its share of these bytes; they are dealt out by other bytes ``by``, if given."""
    return _shares(tuple(sizes), replicas, tuple(by))


@lru_cache(256)
def _shares(sizes: Sequence[int], replicas: int, by: Sequence[int]) -> Sequence[int]:
    loads = [0] * replicas
    for size, owner in zip(sizes, owners(by or sizes, replicas), strict=True):
        loads[owner] += size
    return loads
