"""How many bytes everything takes that a device holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fxpipe.simulator.workspace import Workspace


class Place(NamedTuple):
    """The memory that a value, or its gradient, lies in where it is made.

    Attributes:
        value: the value, or gradient, that this memory counts as; empty for memory that is always
            there, such as a parameter's.
        gradient: whether it is a gradient.
        bytes: of the whole memory.
    """

    value: str
    gradient: bool
    bytes: int


@dataclass(frozen=True)
class Sizes:
    """Bytes of what a device holds, each piece of memory counted once.

    What a stage saves for its backward often holds its inputs and outputs as they are; these
    count as values, and live as long as any buffer holds them.

    Attributes:
        values: value that crosses between stages → bytes of one micro-batch; its gradient has as
            many.
        saved: stage → bytes of one micro-batch that its forward saves, without parameters,
            buffers and the values of ``holds``.
        deferred: stage → bytes that the first half of its backward leaves for the second, counted
            like ``saved``.
        state: stage → bytes of the buffers that its forward writes anew for each micro-batch.
        saved_state: stage → bytes of those among them that its forward saves as they were before.
        parameters: stage → bytes of one version of its parameters.
        gradients: stage → bytes of its sums of gradients, and of a further version of what is
            trained.
        started: stage → bytes of gradients that its first ones of a step are added to.
        optimizer: stage → bytes of its optimizer's state, and of all else that is always there.
        updating: stage → bytes that its update needs for itself while it runs.
        undo: stage → bytes that are kept from its update on, to go back to, until all stages have
            made theirs.
        holds: stage → values that its ``saved`` holds.
        deferred_holds: stage → values that its ``deferred`` holds.
        deferred_gradients: stage → values, into it or from it, whose gradients its ``deferred``
            holds.
        places: (stage, value, whether its gradient) → where that lies which the stage makes; by
            default in memory of its own.
        laid_out: (stage, value, whether its gradient) → bytes of the copy that the stage makes
            where it comes from another device, in another layout than the stage's graphs want.
        runs: letter of a task and stage → what its graph adds while it runs; where it is missing,
            all that it makes counts from its start, and what it uses up until its end.
        adding: the same for a task that adds to sums of gradients that are there already.
        unknown: stages of which it is not known what they save.
    """

    values: Mapping[str, int] = field(default_factory=dict)
    saved: Mapping[int, int] = field(default_factory=dict)
    deferred: Mapping[int, int] = field(default_factory=dict)
    state: Mapping[int, int] = field(default_factory=dict)
    saved_state: Mapping[int, int] = field(default_factory=dict)
    parameters: Mapping[int, int] = field(default_factory=dict)
    gradients: Mapping[int, int] = field(default_factory=dict)
    started: Mapping[int, int] = field(default_factory=dict)
    optimizer: Mapping[int, int] = field(default_factory=dict)
    updating: Mapping[int, int] = field(default_factory=dict)
    undo: Mapping[int, int] = field(default_factory=dict)
    holds: Mapping[int, frozenset[str]] = field(default_factory=dict)
    deferred_holds: Mapping[int, frozenset[str]] = field(default_factory=dict)
    deferred_gradients: Mapping[int, frozenset[str]] = field(default_factory=dict)
    places: Mapping[tuple[int, str, bool], Place] = field(default_factory=dict)
    laid_out: Mapping[tuple[int, str, bool], int] = field(default_factory=dict)
    runs: Mapping[tuple[str, int], Workspace] = field(default_factory=dict)
    adding: Mapping[tuple[str, int], Workspace] = field(default_factory=dict)
    unknown: frozenset[int] = frozenset()
