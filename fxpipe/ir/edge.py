"""A value that goes from one stage to another: the word that Plan and Program share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

HOST = -1
"""The stage number of the caller: inputs come from it, outputs go to it."""

EdgeKind = Literal["in", "act", "skip", "out"]


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """One value on its way from the stage that makes it to one stage that uses it.

    A value with several consumers has one edge to each. An edge always runs forward.

    Attributes:
        source: the producing stage, or HOST for an input of the pipeline.
        target: the consuming stage, or HOST for an output of the pipeline.
        value: the name of the value, unique in its plan.
        gradient: whether the target hands a gradient back to the source for it.
    """

    source: int
    target: int
    value: str
    gradient: bool = False

    @property
    def kind(self) -> EdgeKind:
        """``in`` from the caller, ``out`` to it, ``act`` to the next stage, ``skip`` further on."""
        if self.source == HOST:
            return "in"
        if self.target == HOST:
            return "out"
        return "act" if self.target == self.source + 1 else "skip"

    def __str__(self) -> str:
        ends = f"{stage_name(self.source)}->{stage_name(self.target)}"
        return f"{self.kind} {self.value} {ends}" + (" gradient" if self.gradient else "")


def stage_name(stage: int) -> str:
    """``host`` for the caller, else the stage's number."""
    return "host" if stage == HOST else str(stage)


def gradient_groups(edges: Iterable[Edge]) -> tuple[tuple[Edge, ...], ...]:
    """For each value that gets a gradient, its edges in the order in which the parts are added.

    The caller's first, then from the last stage on: autograd's own order on an uncut graph.
    """
    groups: dict[str, list[Edge]] = {}
    for edge in edges:
        if edge.gradient:
            groups.setdefault(edge.value, []).append(edge)
    return tuple(
        tuple(sorted(group, key=lambda edge: (edge.target != HOST, -edge.target)))
        for group in groups.values()
    )
