"""The time of pairs: of a forward and a backward that a device runs together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxpipe.errors import InputError
from fxpipe.extensions.simulator.costs import Costs, Each, Times
from fxpipe.passes.lowering.pairs import Backward, Pairs

Saved = Mapping[Backward, tuple[int, int, float]]
"""The second task of each pair → stage and micro-batch of its forward, and the time by which the
pair is shorter than both tasks in turn."""


def saved(pairs: Pairs, times: Times, each: Each, costs: Costs | None) -> Saved:
    """How much time pairs save; without a cost, as ``costs["F&B"]``, nothing.

    A cost may be of a stage or a micro-batch, those of the pair's forward.

    Raises:
        InputError: a pair is longer than its tasks in turn, or shorter than one of them.
    """
    known: Mapping[Any, float] = dict((costs or {}).items())
    found: dict[Backward, tuple[int, int, float]] = {}
    for (letter, stage, i), (there, j) in pairs.items():
        first = each.get(("F", there, j), times["F", there])
        then = each.get((letter, stage, i), times[letter, stage])
        key = f"F&{letter}"
        cost = known.get((key, there, j), known.get((key, there), known.get(key, first + then)))
        if not max(first, then) <= cost <= (first + then) * (1 + 1e-9):
            raise InputError(
                f"costs[{key!r}] is {cost!r} for F{j}@{there}&{letter}{i}@{stage}, whose tasks "
                f"take {first:g} and {then:g}; give a time from {max(first, then):g} to "
                f"{first + then:g}"
            )
        found[letter, stage, i] = there, j, first + then - cost
    return found
