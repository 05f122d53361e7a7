"""Bounds on the slowest stage, and the orders and blocks that fill memory best, by brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.extensions.exact_cut.bound import chain_bound, lower_bound, memory_bound
from fxpipe.extensions.exact_cut.orders import (
    Block,
    alone,
    densest_first,
    latest_sources,
    trees,
)
from fxpipe.passes.partition.work import Machine, Transfer, Work
from tests.helpers.works import MANY, chain, machines, works
from tests.oracles.every_division import fits, legal, weighed


@MANY
@given(st.data(), works(), st.integers(1, 3))
def test_no_assignment_beats_the_bounds(data: st.DataObject, work: Work, stages: int) -> None:
    machine = data.draw(machines(stages))
    candidates = [
        max(weighed(work, machine, c)[0]) for c in legal(work, stages) if fits(work, machine, c)
    ]
    if not candidates:
        return
    best = min(candidates)
    assert memory_bound(work, machine) <= best * (1 + 1e-9)
    low = lower_bound(work, machine)
    assert low <= best * (1 + 1e-9)
    assert chain_bound(work, machine, low, max(candidates)) <= best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("seconds", "limits", "bound"),
    [
        # the first may take two bytes, for two micro-batches: one atom; the rest is for the other
        ((4, 3, 2, 1), (2, math.inf), 6),
        # the last may take one: all before it is for the first
        ((1, 2, 3, 4), (math.inf, 1), 6),
        # what is dense comes late: a part of all is taken, as if it could be
        ((1, 2, 3, 4), (2, math.inf), 7.5),
        # there is room for three atoms of four
        ((1, 2, 3, 4), (4, 1), math.inf),
        ((1, 2, 3, 4), (math.inf, math.inf), 0),
    ],
)
def test_the_memory_bound_counts_what_the_others_must_do(
    seconds: Sequence[float], limits: tuple[float, ...], bound: float
) -> None:
    machine = Machine((1.0, 1.0), limits, (2, 1))
    assert memory_bound(replace(chain(seconds), resident=(0,) * 4), machine) == pytest.approx(bound)


def test_the_memory_bound_fills_memory_with_the_densest_part_of_a_branch() -> None:
    """Two branches: 1 s then 8 s, and 2 s then 2 s. Of the first two atoms that the first stage
    has room for, none does more than the first branch, so that 4 s are left."""
    values = (Transfer(0, (2,), 0), Transfer(1, (3,), 0))
    work = Work((1.0, 2.0, 8.0, 2.0), (0,) * 4, (1,) * 4, values)
    assert memory_bound(work, Machine((1.0, 1.0), (2, math.inf), (1, 1))) == pytest.approx(4)


def topological(work: Work) -> Iterator[tuple[int, ...]]:
    for order in itertools.permutations(range(len(work))):
        place = {atom: i for i, atom in enumerate(order)}
        if all(place[s] < place[a] for a, sources in enumerate(work.before) for s in sources):
            yield order


def area(work: Work, order: Sequence[int]) -> float:
    """What lies under the curve of seconds done over bytes taken."""
    done, found = 0.0, 0.0
    for atom in order:
        done += work.seconds[atom]
        found -= work.seconds[atom] * sum(work.saved[a] for a in order[: order.index(atom) + 1])
    return found


@st.composite
def forests(draw: st.DrawFn) -> Work:
    count = draw(st.integers(1, 6))
    parents = [
        draw(st.one_of(st.none(), st.integers(0, a - 1))) if a else None for a in range(count)
    ]
    return Work(
        tuple(float(draw(st.integers(0, 9))) for _ in range(count)),
        (0,) * count,
        tuple(draw(st.integers(1, 5)) for _ in range(count)),
        tuple(Transfer(p, (a,), 0) for a, p in enumerate(parents) if p is not None),
    )


@MANY
@given(forests())
def test_blocks_of_a_forest_give_the_order_that_does_the_most_in_little_memory(work: Work) -> None:
    order = densest_first(work, trees(alone(work), latest_sources(work)))
    best = max(area(work, other) for other in topological(work))
    assert area(work, order) == pytest.approx(best)


def test_a_block_takes_in_what_makes_it_denser_and_nothing_else() -> None:
    blocks = [Block(1.0, 1.0), Block(3.0, 1.0), Block(1.0, 1.0)]
    made = trees(blocks, [None, 0, 1])
    assert [(b.seconds, b.kept, b.part_of) for b in made] == [
        (4.0, 2.0, None),
        (3.0, 1.0, 0),
        (1.0, 1.0, None),
    ]
