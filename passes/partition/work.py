"""The partitioning problem: a graph of atoms with costs, and the devices of the stages.

An atom is a group of nodes that is never cut. Every edge runs from a lower atom number to a higher
one. A partition is legal if no value runs to an earlier stage.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Transfer:
    """A value that its stage sends to each other stage with a reader.

    Attributes:
        source: the atom that makes it; None for a shared parameter, which the first stage that
            reads it owns.
        readers: the atoms that read it.
        bytes: its size for one micro-batch.
        returns: whether a gradient of the same size is sent back.
        resident: for a shared parameter, the bytes that it occupies on its owner.
    """

    source: int | None
    readers: tuple[int, ...]
    bytes: int
    returns: bool = False
    resident: int = 0


@dataclass(frozen=True)
class Work:
    """The atoms of a graph.

    Attributes:
        seconds: atom → time of its forward and backward for one micro-batch at speed 1.
        resident: atom → bytes of its own parameters and buffers, with their gradients, optimizer
            state and versions.
        saved: atom → bytes that it keeps for the backward of each micro-batch.
        transfers: the values between the atoms.
    """

    seconds: tuple[float, ...]
    resident: tuple[int, ...]
    saved: tuple[int, ...]
    transfers: tuple[Transfer, ...] = ()

    def __len__(self) -> int:
        return len(self.seconds)

    @cached_property
    def total(self) -> float:
        return math.fsum(self.seconds)

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """Atom → the atoms that it reads."""
        sources: list[set[int]] = [set() for _ in self.seconds]
        for transfer in self.transfers:
            for reader in transfer.readers:
                if transfer.source is not None and reader != transfer.source:
                    sources[reader].add(transfer.source)
        return tuple(tuple(sorted(atoms)) for atoms in sources)

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """Atom → the atoms that read it."""
        readers: list[list[int]] = [[] for _ in self.seconds]
        for atom, sources in enumerate(self.before):
            for source in sources:
                readers[source].append(atom)
        return tuple(map(tuple, readers))


@dataclass(frozen=True)
class StageDevices:
    """The devices as the stages see them.

    Attributes:
        speeds: stage → speed of its device, relative to the device that was measured.
        limits: stage → bytes that it may occupy; empty for no limits.
        peaks: stage → micro-batches whose saved values it holds at once; by default one.
        per_byte: stage → stage → seconds for each byte that is sent.
        per_message: stage → stage → seconds for each value that is sent.
        names: stage → the name of its device in messages.
        arrived: stage → micro-batches whose received values it holds at once; by default ``peaks``.
            It is more where the stage recomputes.
        reserved: stage → bytes to leave free for what no atom keeps, such as temporary values of
            the stage's graphs; by default none.
    """

    speeds: tuple[float, ...]
    limits: tuple[float, ...] = ()
    peaks: tuple[int, ...] = ()
    per_byte: tuple[tuple[float, ...], ...] = ()
    per_message: tuple[tuple[float, ...], ...] = ()
    names: tuple[str, ...] = ()
    arrived: tuple[int, ...] = ()
    reserved: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        peaks = self.peaks or (1,) * self.stages
        object.__setattr__(self, "peaks", peaks)
        object.__setattr__(self, "arrived", self.arrived or peaks)
        object.__setattr__(self, "reserved", self.reserved or (0,) * self.stages)

    @staticmethod
    def equal(stages: int) -> StageDevices:
        """Equal devices without limits, and links that cost nothing."""
        return StageDevices((1.0,) * stages)

    @property
    def stages(self) -> int:
        return len(self.speeds)

    @property
    def linked(self) -> bool:
        """Whether sending costs time."""
        return any(any(row) for row in (*self.per_byte, *self.per_message))

    @property
    def limited(self) -> bool:
        """Whether memory is limited."""
        return any(limit < math.inf for limit in self.limits)

    @property
    def held(self) -> tuple[tuple[int, int], ...]:
        """Stage → how many micro-batches' saved values it holds, and how many's received values."""
        return tuple(zip(self.peaks, self.arrived, strict=True))

    def name_of(self, stage: int) -> str:
        return self.names[stage] if self.names else f"device {stage}"

    def transfer_seconds(self, source: int, target: int, transfer: Transfer) -> float:
        """Seconds to send a value from stage to stage, and its gradient back."""
        if not transfer.bytes:
            return 0.0  # a value without bytes is a size, which each stage computes itself
        seconds = 0.0
        for a, b in ((source, target), (target, source))[: 1 + transfer.returns]:
            seconds += self.per_byte[a][b] * transfer.bytes if self.per_byte else 0.0
            seconds += self.per_message[a][b] if self.per_message else 0.0
        return seconds


@dataclass(frozen=True)
class StageLoad:
    """What a stage computes, sends and holds.

    Attributes:
        compute: seconds of compute for one micro-batch.
        transfer: seconds of sending and receiving for one micro-batch.
        memory: bytes, with the saved values of all micro-batches that it keeps.
        received: bytes received from other stages for one micro-batch.
    """

    compute: float = 0.0
    transfer: float = 0.0
    memory: float = 0.0
    received: int = 0

    @property
    def seconds(self) -> float:
        return self.compute + self.transfer


@dataclass(frozen=True)
class Division:
    """A division of the atoms among stages: atom → stage, with the load of each stage."""

    stage_of: tuple[int, ...]
    loads: tuple[StageLoad, ...] = field(compare=False)

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage."""
        return max(load.seconds for load in self.loads)

    @property
    def crossing(self) -> int:
        """Bytes sent between stages; each value counts once for each stage that receives it."""
        return sum(load.received for load in self.loads)

    def fits(self, machine: StageDevices) -> bool:
        """Whether every stage keeps its memory limit."""
        return not machine.limits or all(
            load.memory <= limit for load, limit in zip(self.loads, machine.limits, strict=True)
        )


def weigh(work: Work, machine: StageDevices, stage_of: Sequence[int]) -> Division:
    """Compute the loads of an assignment (atom → stage), straight from their definition."""
    stages = machine.stages
    compute, transfer = [0.0] * stages, [0.0] * stages
    held, kept, received = [0] * stages, [0] * stages, [0] * stages
    for atom, stage in enumerate(stage_of):
        compute[stage] += work.seconds[atom]
        held[stage] += work.resident[atom]
        kept[stage] += work.saved[atom]
    for value in work.transfers:
        targets = {stage_of[reader] for reader in value.readers}
        source = min(targets) if value.source is None else stage_of[value.source]
        held[source] += value.resident
        for target in targets - {source}:
            received[target] += value.bytes
            seconds = machine.transfer_seconds(source, target, value) if machine.linked else 0.0
            transfer[source] += seconds
            transfer[target] += seconds
    return Division(
        tuple(stage_of),
        tuple(
            StageLoad(
                compute[k] / machine.speeds[k],
                transfer[k],
                machine.reserved[k] + held[k] + saving * kept[k] + receiving * received[k],
                received[k],
            )
            for k, (saving, receiving) in enumerate(machine.held)
        ),
    )


def sorted_by_rank(
    before: Mapping[int, Collection[int]], rank: Callable[[int, int], Any]
) -> Iterator[int]:
    """Yield items in a topological order; among ready ones the lowest rank, then lowest number.

    ``before`` has the items that each item reads. ``rank`` is called once for each item when it
    becomes ready, with the item and the number of items done so far.
    """
    missing = {item: len(sources) for item, sources in before.items()}
    after: dict[int, list[int]] = {item: [] for item in before}
    for item, sources in before.items():
        for source in sources:
            after[source].append(item)
    heap = [(rank(item, 0), item) for item, count in missing.items() if not count]
    heapq.heapify(heap)
    done = 0
    while heap:
        item = heapq.heappop(heap)[1]
        done += 1
        yield item
        for reader in after[item]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(heap, (rank(reader, done), reader))
