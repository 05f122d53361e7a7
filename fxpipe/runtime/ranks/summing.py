"""Sums of gradients over the N replicas, by default in the order of the replicas.

A gradient is cut into N pieces. Each replica receives one of them from all others, adds up the N
contributions in the order 0, 1, 2 …, and sends the sum to all others. So a rank sends 2(N − 1)/N of
the bytes of its gradients. It goes on computing meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from fxpipe.ir.value import part_of

if TYPE_CHECKING:
    pass

T = TypeVar("T")

Pieces = list[Tensor | None]
"""One replica's piece of each gradient of a stage; None where there is no gradient."""

Layouts = list[tuple[tuple[int, ...], tuple[int, ...]] | None]
"""The shape and strides of each gradient of a stage; None where there is no gradient."""


class Part(NamedTuple):
    """The pieces of a stage's gradients that one replica sums up, or the sums."""

    pieces: Pieces
    layouts: Layouts

    @property
    def nbytes(self) -> int:
        """The bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces if piece is not None)


def cut(gradients: Sequence[Tensor | None], replicas: int) -> list[Part]:
    """Replica → the part that it sums up. The pieces are views of the gradients if possible."""
    layouts = [_layout(gradient) for gradient in gradients]
    columns = [_cut(gradient, index, replicas) for index, gradient in enumerate(gradients)]
    return [Part([column[replica] for column in columns], layouts) for replica in range(replicas)]


def add_up(parts: Sequence[Part]) -> Part:
    """Add up the replicas' contributions to a part, in the given order."""
    pieces: Pieces = []
    for contributions in zip(*(part.pieces for part in parts), strict=True):
        total, *others = [piece for piece in contributions if piece is not None] or [None]
        for index, piece in enumerate(others):
            total = torch.add(total, piece) if index == 0 else total.add_(piece)
        pieces.append(total)
    return Part(pieces, merged([part.layouts for part in parts]))


class RunningSum:
    """The sum of a part. Contributions are added in the order of the replicas once all have
    arrived: then the sum is the same to the bit each time."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._parts: dict[int, Part] = {}

    def take(self, replica: int, part: Part) -> Part | None:
        """Take the contribution of a replica. Returns the sum once all have arrived."""
        self._parts[replica] = part
        if len(self._parts) < self._replicas:
            return None
        return add_up([each for _, each in sorted(self._parts.items())])


def joined(parts: Sequence[Part]) -> list[Tensor | None]:
    """Put the gradients together from the sums of all parts, in memory of their own."""
    return [
        None if layout is None else _join([part.pieces[index] for part in parts], *layout)
        for index, layout in enumerate(parts[0].layouts)
    ]


def merged(lists: Sequence[list[T | None]]) -> list[T | None]:
    """Merge lists of the same length: at each place the first entry that is not None."""
    return [next((x for x in at if x is not None), None) for at in zip(*lists, strict=True)]


def _cut(gradient: Tensor | None, index: int, replicas: int) -> Pieces:
    if gradient is None:
        return [None] * replicas
    if gradient.layout is not torch.strided:  # not cut: the replicas take turns
        return [gradient if index % replicas == replica else None for replica in range(replicas)]
    flat = gradient.detach().reshape(-1)
    spans = [part_of(flat.numel(), replica, replicas) for replica in range(replicas)]
    return [flat[span.start : span.stop] for span in spans]


def _layout(gradient: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The layout of a copy, which has no gaps and no repeated elements."""
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        return tuple(gradient.shape), ()
    return tuple(gradient.shape), torch.empty_like(gradient, device="meta").stride()


def _join(pieces: Pieces, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    present = [piece for piece in pieces if piece is not None]
    if present[0].layout is not torch.strided:
        return present[0].clone()
    like = present[0]
    gradient = torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
    if gradient.is_contiguous():
        return torch.cat(present, out=gradient.view(-1)).view(shape)
    return gradient.copy_(torch.cat(present).view(shape))
