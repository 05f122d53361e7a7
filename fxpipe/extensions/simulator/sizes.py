"""The bytes of all that a device holds, and of what its graphs add while they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fxpipe.ir.value import Buffer
from fxpipe.parts import Parts

Crossing = tuple[str, bool]
"""A value that crosses between stages, by name, and whether its gradient is meant."""


class GraphInput(NamedTuple):
    """An argument of a graph.

    Attributes:
        crossing: the value or gradient.
        bytes: of its memory.
        last: the last step at which the graph reads it; −1 if it reads a copy.
    """

    crossing: Crossing
    bytes: int
    last: int


@dataclass(frozen=True)
class Workspace:
    """The bytes that a graph of a stage adds while it runs, step by step.

    Attributes:
        levels: step → bytes more than before the graph ran; the return is the last step. They are
            what its nodes have made and is still read or returned, less what was kept for this
            graph alone and is used up. Below 0, it has freed more than it has made.
        freed: arguments that are freed after their last use if nothing else holds them.
    """

    levels: tuple[int, ...]
    freed: tuple[GraphInput, ...] = ()

    def peak(self, freed: Iterable[GraphInput] = ()) -> int:
        """The most bytes that the graph adds while it frees these arguments."""
        level = 0
        gone = [0] * (len(self.levels) + 1)
        for _, size, last in freed:
            gone[last + 1] += size
        most = self.levels[0]
        for made, less in zip(self.levels, gone, strict=False):
            level -= less
            most = max(most, made + level)
        return most


class Storage(NamedTuple):
    """The memory of a value, or its gradient, in the stage that makes it.

    Attributes:
        crossing: the value or gradient whose memory it is; None for memory that is always there,
            such as a parameter's.
        bytes: of the whole memory.
    """

    crossing: Crossing | None
    bytes: int


@dataclass(frozen=True)
class Sizes:
    """Bytes of what a device holds, each piece of memory counted once.

    Inputs and outputs that a stage saves for its backward count as values, and live as long as any
    buffer holds them.

    Attributes:
        values: value that crosses between stages → bytes of one micro-batch, and of its gradient.
        saved: stage → bytes of one micro-batch that its forward saves, without parameters, buffers
            that nothing writes, and the values of ``holds``.
        deferred: stage → bytes that the first half of its backward leaves for the second, counted
            like ``saved``. Without the half's graph in ``runs`` they are taken as a part of these:
            the half releases the others, and holds the greater of the two while it runs.
        state: stage → bytes of the buffers that its forward writes anew for each micro-batch.
        parameters: stage → bytes of one version of its parameters.
        each: stage → bytes of each of its parameters, in order. If missing, ``elements`` counts.
        buffers: stage → bytes of the buffers that it reads.
        gradients: stage → bytes of its sums of gradients, and of each further version of what is
            trained.
        elements: stage → (number of elements, bytes of one) for each parameter's gradient. If
            missing, ``gradients`` counts as one gradient of single bytes.
        buckets: stage → the parameters of each bucket in which replicas sum its gradients.
        optimizer: stage → bytes of its optimizer's state, and of all else that is always there.
        updating: stage → bytes that its update needs while it runs.
        holds: stage → values that its ``saved`` holds.
        deferred_holds: stage → values, and gradients of values, that its ``deferred`` holds.
        places: (stage, value, whether its gradient) → the memory of what the stage makes; by
            default its own.
        runs: letter of a task and stage → what its graph adds while it runs. If missing, outputs
            count from its start, and inputs that it uses up until its end.
        adding: the same for a task that adds to sums of gradients that are there already.
        early: how many values from each other device may be in memory before their receives: on
            ranks as many receives as they post ahead.
        handed: values that the caller keeps as they are handed over, until the step is over.
        context: bytes that each device takes besides, of its driver, libraries and communicators.
        reserved: bytes that an allocator takes for each byte that is held, at least 1.
        block: of how many bytes what devices allocate is a multiple. What crosses between devices,
            ``values`` and ``elements``, has not been rounded to it, all else has.
    """

    values: Mapping[str, int] = field(default_factory=dict)
    saved: Mapping[int, int] = field(default_factory=dict)
    deferred: Mapping[int, int] = field(default_factory=dict)
    state: Mapping[int, int] = field(default_factory=dict)
    parameters: Mapping[int, int] = field(default_factory=dict)
    each: Mapping[int, Sequence[int]] = field(default_factory=dict)
    buffers: Mapping[int, int] = field(default_factory=dict)
    gradients: Mapping[int, int] = field(default_factory=dict)
    elements: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    buckets: Mapping[int, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    optimizer: Mapping[int, int] = field(default_factory=dict)
    updating: Mapping[int, int] = field(default_factory=dict)
    holds: Mapping[int, frozenset[str]] = field(default_factory=dict)
    deferred_holds: Mapping[int, frozenset[Crossing]] = field(default_factory=dict)
    places: Mapping[tuple[int, str, bool], Storage] = field(default_factory=dict)
    runs: Mapping[tuple[str, int], Workspace] = field(default_factory=dict)
    adding: Mapping[tuple[str, int], Workspace] = field(default_factory=dict)
    early: int = 0
    handed: frozenset[str] = frozenset()
    context: int = 0
    reserved: float = 1
    block: int = 1

    def crossing(self, buffer: Buffer) -> int:
        """Bytes that cross to another device: a value; parameters and buffers, which a stage gives
        to its copy; or sums and what forwards wrote, which the copy gives back."""
        stage = buffer.source
        if buffer.kind == "weights":
            return self.parameters.get(stage, 0) + self.buffers.get(stage, 0)
        if buffer.kind == "sums":
            return self.gradients.get(stage, 0) + self.state.get(stage, 0)
        return self.values.get(buffer.value, 0)

    def part(self, stage: int, replica: int, replicas: int, bucket: int | None = None) -> int:
        """Bytes of the part of a stage's gradients, or of a bucket of them, that a replica sums."""
        whole = self.elements.get(stage, [(self.gradients.get(stage, 0), 1)])
        if bucket is not None and stage in self.buckets:
            whole = [whole[index] for index in self.buckets[stage][bucket]]
        if replicas == 1:
            return sum(count * size for count, size in whole)
        counts = Counter[int]()  # tensors of one data type are divided together
        for count, size in whole:
            counts[size] += count
        part_of = Parts.part_of.find()
        return sum(size * len(part_of(counts[size], replica, replicas)) for size in counts)
