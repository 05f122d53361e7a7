"""How much more memory a device holds while it runs a graph of a stage than before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

Crossing = tuple[str, bool]
"""A value that crosses between stages, by name, and whether its gradient is meant."""


class Given(NamedTuple):
    """An argument of a graph.

    Attributes:
        crossing: what it is.
        bytes: of its memory.
        last: the last step at which the graph needs it.
    """

    crossing: Crossing
    bytes: int
    last: int


class Passing(NamedTuple):
    """Memory that is there until a step of a graph is done.

    Attributes:
        bytes: of it.
        last: that step.
    """

    bytes: int
    last: int


@dataclass(frozen=True)
class Workspace:
    """The bytes that a graph of a stage adds while it runs, step by step.

    Attributes:
        levels: step → bytes more than before the graph ran, at the return last: what its nodes
            have made and somebody still reads or gets, less what was kept for it alone and is used
            up. Where this is below zero, it has freed more than it has made.
        freed: what is freed besides, where nobody else holds it.
        laid_out: what is copied, as the graph wants its elements, where it came from another
            device; with the bytes of the copy.
    """

    levels: tuple[int, ...]
    freed: tuple[Given, ...] = ()
    laid_out: tuple[Given, ...] = ()

    def peak(self, freed: Iterable[Passing] = (), copied: Iterable[Passing] = ()) -> int:
        """The most bytes more than before.

        Args:
            freed: what was there before and goes.
            copied: what is made before the first step.
        """
        level = 0
        gone = [0] * (len(self.levels) + 1)
        for size, last in freed:
            gone[last + 1] += size
        for size, last in copied:
            level += size
            gone[last + 1] += size
        most = self.levels[0] + level
        for made, less in zip(self.levels, gone, strict=False):
            level -= less
            most = max(most, made + level)
        return most
