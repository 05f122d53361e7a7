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
        return (program.replicas - 1) * gradient_shares(sizes, self.stage, program)[replica]

    def most(self, sizes: StageBytes, program: Program) -> int:
        return (program.replicas - 1) * max(gradient_shares(sizes, self.stage, program))


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


def owners(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Which replica updates each of a stage's parameters, if each updates some for all: the largest
    first, each by the replica that has the fewest bytes so far.

    Args:
        sizes: the bytes of each parameter.
        loads: replica → the bytes that it has of the device's stages before; these are added.
    """
    found, least = [0] * len(sizes), [(load, owner) for owner, load in enumerate(loads)]
    heapify(least)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, owner = least[0]
        found[index], loads[owner] = owner, load + sizes[index]
        heapreplace(least, (loads[owner], owner))
    return found


def shares(sizes: StageBytes, stage: int, program: Program) -> Sequence[int]:
    """Replica → the bytes that it has of a stage's parameters."""
    stages = _on_device(sizes, stage, program)
    return _shares(stages[-1], stages, program.replicas)


def gradient_shares(
    sizes: StageBytes, stage: int, program: Program, bucket: int | None = None
) -> Sequence[int]:
    """Replica → the bytes of the gradients of its parameters, or of those in a bucket."""
    stages = _on_device(sizes, stage, program)
    known = sizes.elements.get(stage, [(sizes.gradients.get(stage, 0), 1)])
    each = [count * size for count, size in known]
    if bucket is not None and (buckets := sizes.buckets.get(stage)):
        each = [size if at in buckets[bucket] else 0 for at, size in enumerate(each)]
    if len(each) != len(stages[-1]):
        stages = (tuple(each),)
    return _shares(tuple(each), stages, program.replicas)


def fullest(sizes: StageBytes, stage: int, program: Program) -> int:
    """The replica that has the most of all stages of a stage's device."""
    of = [s for s, home in enumerate(program.placement) if home == program.placement[stage]]
    loads = [sum(each) for each in zip(*(shares(sizes, s, program) for s in of), strict=True)]
    return loads.index(max(loads))


def _on_device(sizes: StageBytes, stage: int, program: Program) -> tuple[tuple[int, ...], ...]:
    """The bytes of each parameter of a stage and, before it, of those before it on its device."""
    place = program.placement[: stage + 1]
    return tuple(tuple(_each(sizes, s)) for s, home in enumerate(place) if home == place[-1])


def _each(sizes: StageBytes, stage: int) -> Sequence[int]:
    if stage in sizes.each:
        return [*sizes.each[stage]]
    if stage in sizes.elements:
        return [count * size for count, size in sizes.elements[stage]]
    return [sizes.parameters.get(stage, sizes.gradients.get(stage, 0))]


@lru_cache(1024)
def _shares(
    sizes: tuple[int, ...], stages: tuple[tuple[int, ...], ...], replicas: int
) -> Sequence[int]:
    found, loads, of = [0] * replicas, [0] * replicas, list[int]()
    for each in stages:
        of = owners(each, loads)
    for size, owner in zip(sizes, of, strict=True):
        found[owner] += size
    return found
