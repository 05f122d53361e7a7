"""Sums of gradients over the replicas, in the order of the replicas unless it may be another.

A gradient of n elements is cut into as many pieces as there are replicas. Each replica gets one of
them from all others, adds them in the order 0, 1, 2 …, and tells the sum to all. So a rank sends
2(N − 1)/N of the bytes of its gradients, and whatever it computes meanwhile, it does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from fxpipe.ir import instruction as ins
from fxpipe.ir.value import part_of

if TYPE_CHECKING:
    from fxpipe.runtime.interpreter import Machine
    from fxpipe.runtime.ranks.channels import RankChannels

Pieces = list[Tensor | None]
"""For each gradient of a stage one replica's piece of it; None where there is no gradient."""

Layouts = list[tuple[tuple[int, ...], tuple[int, ...]] | None]
"""For each gradient its shape and strides, or None."""


def between(machine: Machine) -> RankChannels:
    """The channels between the replicas of a program, which only ranks have."""
    return cast("RankChannels", machine.channels)


def reduce_scatter(machine: Machine, instruction: ins.ReduceScatter) -> None:
    """See ins.ReduceScatter."""
    stage, batch = instruction.stage, instruction.batch
    gradients = machine.store.gradients.pop((stage, batch), [])
    between(machine).reduce_scatter(stage, machine.step + batch, gradients, -1)


def take_sums(machine: Machine, instruction: ins.AllGather | ins.TakePart) -> None:
    """See ins.AllGather and ins.TakePart."""
    stage, batch, ranks = instruction.stage, instruction.batch, between(machine)
    take = ranks.all_gather if isinstance(instruction, ins.AllGather) else ranks.take_part
    count, number = machine.program.buckets.get(stage, 1), machine.step + batch
    machine.store.gradients[stage, batch] = take(stage, number, count)


def gather_weights(machine: Machine, instruction: ins.GatherWeights) -> None:
    """See ins.GatherWeights."""
    stage, batch = instruction.stage, machine.step + instruction.batch
    parts = between(machine).gather_weights(stage, batch)
    machine.weights.gather(stage, batch + 1, parts)


class Part(NamedTuple):
    """The pieces of a stage's gradients that one replica adds up, or their sums."""

    pieces: Pieces
    layouts: Layouts

    @property
    def nbytes(self) -> int:
        """How many bytes the pieces have."""
        return sum(piece.nbytes for piece in self.pieces if piece is not None)


def cut(gradients: Sequence[Tensor | None], replicas: int) -> list[Part]:
    """Replica → the part that it adds up. The pieces share the gradients' memory where they can."""
    layouts = [_layout(gradient) for gradient in gradients]
    columns = [_cut(gradient, index, replicas) for index, gradient in enumerate(gradients)]
    return [Part([own[replica] for own in columns], layouts) for replica in range(replicas)]


def add_up(parts: Sequence[Part]) -> Part:
    """The sums of what all replicas have of a part, in their order."""
    pieces: Pieces = []
    layouts: Layouts = []
    for own, told in zip(
        zip(*(part.pieces for part in parts), strict=True),
        zip(*(part.layouts for part in parts), strict=True),
        strict=True,
    ):
        first, *others = [piece for piece in own if piece is not None] or [None]
        total = first
        for index, piece in enumerate(others):
            total = torch.add(total, piece) if index == 0 else total.add_(piece)
        pieces.append(total)
        layouts.append(next((layout for layout in told if layout is not None), None))
    return Part(pieces, layouts)


class RunningSum:
    """The sum of a part, as the replicas' gradients come.

    In the order of the replicas it is the same to the bit each time, and is made when all have
    come. In the order in which they come, only the last one is still to be added then.
    """

    def __init__(self, replicas: int, ordered: bool) -> None:
        """Nothing has come yet."""
        self._replicas, self._ordered = replicas, ordered
        self._come = 0
        self._parts: dict[int, Part] = {}

    def take(self, replica: int, part: Part) -> Part | None:
        """Take what has come of a replica. Returns the sum once all have come."""
        self._come += 1
        self._parts[replica] = part
        if self._come == self._replicas or (not self._ordered and self._come > 1):
            self._parts = {-1: add_up([each for _, each in sorted(self._parts.items())])}
        return self._parts[-1] if self._come == self._replicas else None


def joined(parts: Sequence[Part]) -> list[Tensor | None]:
    """The gradients from the sums of all parts, in memory of their own."""
    return [
        None if layout is None else _join([part.pieces[index] for part in parts], *layout)
        for index, layout in enumerate(parts[0].layouts)
    ]


def merged(buckets: Sequence[Pieces]) -> Pieces:
    """One list of what some buckets have, each of them None elsewhere."""
    return [next((x for x in own if x is not None), None) for own in zip(*buckets, strict=True)]


def _cut(gradient: Tensor | None, index: int, replicas: int) -> Pieces:
    if gradient is None:
        return [None] * replicas
    if gradient.layout is not torch.strided:  # all of it is one piece
        return [gradient if index % replicas == each else None for each in range(replicas)]
    flat = gradient.detach().reshape(-1)
    spans = [part_of(flat.numel(), replica, replicas) for replica in range(replicas)]
    return [flat[span.start : span.stop] for span in spans]


def _layout(gradient: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The layout of a copy; it has no gaps, and no elements twice."""
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        return tuple(gradient.shape), ()
    return tuple(gradient.shape), torch.empty_like(gradient, device="meta").stride()


def _join(pieces: Pieces, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    found = [piece for piece in pieces if piece is not None]
    if found[0].layout is not torch.strided:
        return found[0].clone()
    made = torch.empty_strided(shape, strides, dtype=found[0].dtype)
    if made.is_contiguous():
        return torch.cat(found, out=made.view(-1)).view(shape)
    return made.copy_(torch.cat(found).view(shape))
