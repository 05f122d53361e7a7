"""Small graphs of work and small machines, drawn at random, and operations that cost the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from fxpipe.compiler import passes
from fxpipe.compiler.placement import Placement
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.passes.partition.work import StageDevices, Transfer, Work
from fxpipe.passes.runner import run_all

MANY = settings(max_examples=max(120, settings().max_examples))
"""Graphs are small here, and those that tell a wrong bound from a right one are rare."""


@st.composite
def works(draw: st.DrawFn, atoms: int = 7) -> Work:
    count = draw(st.integers(1, atoms))
    seconds = st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.005, 3.0, 7.0])
    size = st.integers(0, 4)
    transfers = []
    for source in range(count - 1):
        readers = draw(st.sets(st.integers(source + 1, count - 1), max_size=3))
        if readers:
            value = Transfer(source, tuple(sorted(readers)), draw(size), draw(st.booleans()))
            transfers.append(value)
    if count > 1 and draw(st.booleans()):
        users = draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=3))
        held = draw(st.integers(0, 8))
        transfers.append(Transfer(None, tuple(sorted(users)), draw(size), True, held))
    return Work(
        tuple(draw(seconds) for _ in range(count)),
        tuple(draw(size) for _ in range(count)),
        tuple(draw(size) for _ in range(count)),
        tuple(transfers),
    )


def chain(seconds: Sequence[float], sizes: Sequence[int] = ()) -> Work:
    """Each atom reads the one before it."""
    sizes = sizes or [1] * len(seconds)
    return Work(
        tuple(seconds),
        (1,) * len(seconds),
        (1,) * len(seconds),
        tuple(Transfer(i, (i + 1,), sizes[i], True) for i in range(len(seconds) - 1)),
    )


@st.composite
def machines(draw: st.DrawFn, stages: int) -> StageDevices:
    def table(amounts: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        if not draw(st.booleans()):
            return ()
        same = draw(st.sampled_from(amounts))
        alike = draw(st.booleans())
        return tuple(
            tuple(same if alike else draw(st.sampled_from(amounts)) for _ in range(stages))
            for _ in range(stages)
        )

    def each(one: st.SearchStrategy[float], otherwise: float) -> tuple[float, ...]:
        if not draw(st.booleans()):
            return (otherwise,) * stages
        return tuple(draw(one) for _ in range(stages))

    return StageDevices(
        speeds=each(st.sampled_from([0.5, 1.0, 2.0]), 1.0),
        limits=each(st.sampled_from([8.0, 20.0, 40.0, math.inf]), math.inf),
        peaks=tuple(range(stages, 0, -1)),
        per_byte=table((0.0, 0.1, 1.0)),
        per_message=table((0.0, 0.2)),
        arrived=draw(st.sampled_from([(), (3,) * stages])),
        reserved=draw(st.sampled_from([(), tuple(range(stages)), (-2,) * stages])),
    )


def timed_alike(self: Placement, facts: Mapping[str, Any]) -> dict[str, NodeCost]:
    """In place of ``Placement._timed``: each operation of a model takes as long as any other."""
    costs = run_all(passes.of(self._options, "measure"), facts)["costs"]
    return {name: NodeCost(1.0, 2.0, cost.bytes, 1.0, 1.0) for name, cost in costs.items()}
