"""The shapes of the flat inputs of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Dims = Sequence[tuple[int, ...]]
"""Flat input → some of its dimensions."""

Shapes = Sequence[tuple[int, ...] | None]
"""Flat input → its shape; None if it is no tensor."""


def shapes_of(leaves: Sequence[Any]) -> Shapes:
    """The shapes of flat inputs."""
    return [tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves]


def resized(leaf: Any, strides: Sequence[int], shape: tuple[int, ...] | None) -> Any:
    """A tensor without data of another shape, laid out like one with these strides: with as much
    room after each dimension, such as after ``x[:, :-1]``."""
    if shape is None:
        return leaf
    if not strides:
        return torch.empty(shape, dtype=leaf.dtype, device="meta")
    made, last = [0] * len(shape), -1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        if strides[dim] and last < 0:
            made[dim], last = strides[dim], dim
        elif strides[dim]:
            room = max(strides[dim] // strides[last] - leaf.shape[last], 0)
            made[dim], last = made[last] * (shape[last] + room), dim
    return torch.empty_strided(shape, made, dtype=leaf.dtype, device="meta")
