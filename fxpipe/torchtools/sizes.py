"""Evaluate sizes of an exported graph, which are expressions of the sizes of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Sizes = tuple[Any, ...] | None
"""A tensor's shape, of numbers and expressions; None for what is no tensor."""


def sizes(value: Any) -> Sizes:
    """The shape of a tensor without data."""
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(x.node.expr if isinstance(x, torch.SymInt) else x for x in value.shape)


def evaluated(
    wanted: Sequence[Sizes], inputs: Sequence[Sizes], shapes: Sequence[tuple[int, ...] | None]
) -> list[tuple[int, ...] | None] | None:
    """The ``wanted`` shapes where ``inputs`` have these ``shapes``; None if they are not whole
    numbers, or depend on sizes that the inputs do not have."""
    import sympy  # which takes long, and only a graph for several sizes needs

    known: dict[Any, Any] = {}
    for symbolic, shape in zip(inputs, shapes, strict=True):
        for size, number in zip(symbolic or (), shape or (), strict=False):
            symbols: set[Any] = getattr(size, "free_symbols", set()) - known.keys()
            if len(symbols) == 1:
                (symbol,) = symbols
                found = sympy.solve(size.xreplace(known) - number, symbol)
                known[symbol] = found[0] if len(found) == 1 else sympy.nan

    def value(size: Any) -> int:
        number = size if isinstance(size, int) else size.xreplace(known)
        if int(number) != number:
            raise ValueError(f"{number} is no whole number")
        return int(number)

    try:
        return [shape and tuple(map(value, shape)) for shape in wanted]
    except (TypeError, ValueError):
        return None
