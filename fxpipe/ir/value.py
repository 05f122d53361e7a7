"""Edges, along which values go between stages, and the buffers that hold values in a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

HOST = -1
"""The stage number of the caller: inputs come from it, outputs go to it."""

FURTHEST = 1_000
"""The most batches that tasks, delays and versions may reach back."""

EdgeKind = Literal["in", "act", "skip", "out", "grad"]


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """One value on its way from the stage that makes it to one stage that uses it.

    A value with several consumers has one edge to each. An edge of a forward's value runs to a
    later stage, one of a backward's to an earlier stage.

    Attributes:
        source: the producing stage, or HOST for what the caller gives.
        target: the consuming stage, or HOST for what the caller gets.
        value: the name of the value, unique among the values of its plan's forwards, or of its
            backwards.
        gradient: whether a backward makes the value.
    """

    source: int
    target: int
    value: str
    gradient: bool = False

    @property
    def kind(self) -> EdgeKind:
        """``in`` from the caller, ``out`` to it, ``act`` to the next stage, ``skip`` further on;
        ``grad`` for what a backward makes."""
        if self.gradient:
            return "grad"
        if self.source == HOST:
            return "in"
        if self.target == HOST:
            return "out"
        return "act" if self.target == self.source + 1 else "skip"

    def __str__(self) -> str:
        return f"{self.kind} {self.value} {stage_name(self.source)}->{stage_name(self.target)}"

    @property
    def back(self) -> Edge:
        """The edge on which the gradient of the value comes back."""
        return Edge(self.target, self.source, self.value, gradient=True)

    def buffer(self, microbatch: int, batch: int = 0) -> Buffer:
        """The buffer of a micro-batch's value along the edge."""
        return Buffer(self.kind, self.value, self.source, self.target, microbatch, batch)


def stage_name(stage: int) -> str:
    """``host`` for the caller, else the stage's number."""
    return "host" if stage == HOST else str(stage)


def outputs_of(edges: Iterable[Edge]) -> tuple[str, ...]:
    """The values of some edges, each once, in order."""
    return tuple(dict.fromkeys(edge.value for edge in edges))


def by_value(edges: Iterable[Edge]) -> tuple[tuple[Edge, ...], ...]:
    """For each value among some edges, its edges, in order."""
    groups: dict[str, list[Edge]] = {}
    for edge in edges:
        groups.setdefault(edge.value, []).append(edge)
    return tuple(map(tuple, groups.values()))


def gradient_groups(edges: Iterable[Edge]) -> tuple[tuple[Edge, ...], ...]:
    """For each value among the edges of gradients into a stage, its edges in the order in which
    the parts are added.

    The caller's first, then from the last stage on: autograd's own order on an uncut graph.
    """

    def order(edge: Edge) -> tuple[bool, int]:
        return edge.source != HOST, -edge.source

    return tuple(tuple(sorted(group, key=order)) for group in by_value(edges))


class Connected:
    """What has edges between stages: a Plan or a Program."""

    edges: tuple[Edge, ...]
    gradients: tuple[Edge, ...]

    def edges_into(self, stage: int) -> tuple[Edge, ...]:
        """The edges that a stage's forward reads, in the order of ``edges``."""
        return self._at.get(("edges into", stage), ())

    def edges_from(self, stage: int) -> tuple[Edge, ...]:
        """The edges that a stage's forward writes, in the order of ``edges``."""
        return self._at.get(("edges from", stage), ())

    def gradients_into(self, stage: int) -> tuple[Edge, ...]:
        """The edges that a stage's backward reads, in the order of ``gradients``."""
        return self._at.get(("gradients into", stage), ())

    def gradients_from(self, stage: int) -> tuple[Edge, ...]:
        """The edges that a stage's backward writes, in the order of ``gradients``."""
        return self._at.get(("gradients from", stage), ())

    @cached_property
    def _at(self) -> Mapping[tuple[str, int], tuple[Edge, ...]]:
        found: dict[tuple[str, int], list[Edge]] = {}
        for kind, edges in ("edges", self.edges), ("gradients", self.gradients):
            for edge in edges:
                found.setdefault((f"{kind} into", edge.target), []).append(edge)
                found.setdefault((f"{kind} from", edge.source), []).append(edge)
        return {end: tuple(edges) for end, edges in found.items()}


BufferKind = str
"""One of ``Buffer``, or another for what a stage keeps for itself."""

OWN = ("saved", "deferred", "state")
"""The kinds of buffers that a stage keeps for itself; extensions have further ones."""

BETWEEN = ("in", "act", "skip", "out", "grad", "norm")
"""The kinds of buffers that go from one stage to another; all others are of one stage."""

COPIED = ("weights", "sums")
"""The kinds of buffers that go between a stage's own device and its copies."""


class Buffer(NamedTuple):
    """A place for one value of one micro-batch on one device.

    The kinds:

    - ``in``, ``act``, ``skip``, ``out``: a value on its way along an edge.
    - ``grad``: the same for a value that a backward makes, such as the gradient of another.
    - ``saved``: what a stage keeps from forward to backward.
    - ``deferred``: what it keeps from the input-gradient half of a backward to the other half.
    - ``state``: the model's buffers that a forward read, kept until it is recomputed.
    - ``norm``: the norms of a stage's gradients on their way to another stage.
    - ``weights``: a stage's weights and buffers on their way to a copy on another device.
    - ``sums``: the gradients and BatchNorm moments that a copy has summed, on their way back.

    ``weights`` and ``sums`` have the copy's device in place of a micro-batch. Extensions have
    further kinds, for what a stage keeps for itself.
    """

    kind: BufferKind
    value: str
    source: int
    target: int
    microbatch: int
    batch: int = 0

    def __str__(self) -> str:
        index = f"[{self.microbatch}{batch_mark(self.batch)}]"
        if self.kind not in BETWEEN:
            return f"{self.kind}:{self.source}{index}"
        return (
            f"{self.kind}:{self.value}:{stage_name(self.source)}->{stage_name(self.target)}{index}"
        )


def batch_mark(batch: int) -> str:
    """The mark of a batch in texts: a ``'`` for each step that it lies back, ``+`` for each ahead.

    Beyond FURTHEST, where nothing is valid, it is a number in brackets, which is not parsed.
    """
    return "'" * -batch + "+" * batch if abs(batch) <= FURTHEST else f"({batch:+})"


def own_buffer(kind: BufferKind, stage: int, microbatch: int, batch: int = 0) -> Buffer:
    """A buffer of one stage alone, of no kind in ``BETWEEN``; those in ``COPIED`` have the copy's
    device for a micro-batch."""
    return Buffer(kind, "", stage, stage, microbatch, batch)


def norm_buffer(source: int, target: int, batch: int = 0) -> Buffer:
    """The buffer of a stage's gradient norms for another stage or itself."""
    return Buffer("norm", "norm", source, target, 0, batch)


class Operands(NamedTuple):
    """The buffers of one micro-batch of a stage.

    Attributes:
        inputs: what its forward reads.
        outputs: for each value that its forward makes, a buffer for each consumer.
        saved: what its forward keeps.
        kept: what its backward uses up: ``saved``, or the same when it is back.
        gradients: for each value that its backward reads, the parts in the order of their sum.
        returned: for each value that its backward makes for others, a buffer for each consumer.
    """

    inputs: tuple[Buffer, ...]
    outputs: tuple[tuple[Buffer, ...], ...]
    saved: Buffer
    kept: Buffer
    gradients: tuple[tuple[Buffer, ...], ...]
    returned: tuple[tuple[Buffer, ...], ...]
