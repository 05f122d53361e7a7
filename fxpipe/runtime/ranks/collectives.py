"""Sums over replicas whose devices compute on streams, by the collectives of their backend.

The ranks with the same device in all replicas have a communicator. All of them run the same list,
so they launch the same collectives in the same order. A collective follows what is launched on the
compute stream and runs beside it; that stream waits where the list waits for sums, norms or
weights. No host waits.

Tensors of one data type are sent together, in rows: one for each replica, filled up to the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.ir.value import part_of
from fxpipe.runtime.interpreter import Machine
from fxpipe.runtime.ranks.channels import RankChannels
from fxpipe.runtime.ranks.summing import Layouts, Part, Pieces, cut, joined, merged

Kinds = Sequence[tuple[torch.dtype, int] | None]
"""The data type and the number of elements of each whole tensor; None where there is none."""

Rows = dict[torch.dtype, Tensor]
"""Data type → rows, a tensor of two dimensions."""


class _Begun(NamedTuple):
    """Collectives that were launched.

    Attributes:
        kinds: the tensors of which the rows have parts.
        rows: what the collectives fill.
        works: the collectives.
        given: what they read, which is kept until they are done.
        layouts: those of the tensors, if they are gradients.
    """

    kinds: Kinds
    rows: Rows
    works: Sequence[Any]
    given: Rows
    layouts: Layouts


class CollectiveChannels(RankChannels):
    """Channels of a device with streams, whose sums over the replicas are collectives."""

    def __init__(self, *args: Any, in_order: bool) -> None:
        """Make channels as RankChannels does. ``in_order`` adds the contributions in the order of
        the replicas, not in that of the backend."""
        self._in_order = in_order
        self._summing: dict[tuple[int, int, int], _Begun] = {}
        self._updated: dict[tuple[int, int], _Begun] = {}
        super().__init__(*args)

    def prepare(self, machine: Machine) -> None:
        self._weights, self._stages = machine.weights, machine.stages
        super().prepare(machine)

    def reduce_scatter(
        self, stage: int, batch: int, gradients: list[Tensor | None], bucket: int
    ) -> None:
        """See RankChannels. All replicas must have gradients for the same parameters.

        Raises:
            InputError: a gradient is sparse, or autograd has found none.
        """
        self._check(stage, gradients)
        parts = cut(gradients, self._group.replicas)
        kinds = [None if x is None else (x.dtype, x.numel()) for x in gradients]
        given = rows_of([part.pieces for part in parts], kinds, self._group.replicas)
        rows, works, twins = Rows(), [], self._pairs.twins
        with self._explained():
            for dtype, row in given.items():
                if self._in_order:
                    rows[dtype] = torch.empty_like(row)
                    work = twins.alltoall_base(_real(rows[dtype]), _real(row), [], [])
                elif stage in self._program.sharded:
                    rows[dtype] = torch.empty_like(row[:1])
                    options = dist.ReduceScatterOptions()  # type: ignore[attr-defined,unused-ignore]
                    work = twins._reduce_scatter_base(_real(rows[dtype]), _real(row), options)
                else:
                    rows[dtype] = row
                    work = twins.allreduce([_real(row)])
                works.append(work)
        self._summing[stage, batch, bucket] = _Begun(kinds, rows, works, given, parts[0].layouts)

    def all_gather(self, stage: int, batch: int, buckets: int) -> list[Tensor | None]:
        sums = []
        for bucket in range(-1, buckets - 1):
            begun, rows = self._summed(stage, batch, bucket)
            if self._in_order:
                rows = self._waited(self._gather(begun.kinds, rows))
            parts = self._parts_of(rows, begun.kinds)
            sums.append(joined([Part(pieces, begun.layouts) for pieces in parts]))
        return merged(sums)

    def take_part(self, stage: int, batch: int, buckets: int) -> list[Tensor | None]:
        here, replicas, sums = self._group.replica, self._group.replicas, []
        for bucket in range(-1, buckets - 1):
            begun, rows = self._summed(stage, batch, bucket)
            sums.append(_pieces(rows, 0, begun.kinds, here, replicas))
        return merged(sums)

    def all_norms(self, stage: int, batch: int, own: list[Tensor | None]) -> list[Tensor | None]:
        present = [norm for norm in own if norm is not None]
        if not present:
            return []
        norms = torch.stack(present)
        rows = self._waited(self._gather([], {norms.dtype: norms[None]}))
        return [*rows[norms.dtype].view(-1).unbind()]

    def give_weights(self, stage: int, batch: int, parts: list[Tensor]) -> None:
        sizes = self._weights.trained_sizes(stage) if parts else []
        kinds = [(part.dtype, size) for part, size in zip(parts, sizes, strict=True)]
        self._updated[stage, batch] = self._gather(
            kinds, rows_of([parts], kinds, self._group.replicas)
        )

    def gather_weights(self, stage: int, batch: int) -> list[list[Tensor]]:
        updated = self._updated.pop((stage, batch))
        parts = self._parts_of(self._waited(updated), updated.kinds)
        return [[piece for piece in pieces if piece is not None] for pieces in parts]

    def pool(
        self, device: int, step: int, values: dict[str, Tensor], *, whole: bool
    ) -> list[dict[str, Tensor]]:
        names = sorted(values)
        kinds = [(values[name].dtype, values[name].numel()) for name in names]
        rows = rows_of([[values[name] for name in names]], kinds, 1)
        if whole:
            rows = self._waited(self._gather(kinds, rows))
        else:
            options = dist.BroadcastOptions()  # type: ignore[attr-defined,unused-ignore]
            options.rootRank = 0
            with self._explained():
                for row in rows.values():
                    self._pairs.twins.broadcast([row], options).wait()
        return [
            {
                name: piece.view(values[name].shape)
                for name, piece in zip(names, _pieces(rows, replica, kinds, 0, 1), strict=True)
                if piece is not None
            }
            for replica in range(self._group.replicas if whole else 1)
        ]

    def _check(self, stage: int, gradients: Sequence[Tensor | None]) -> None:
        """Raise InputError if autograd has found no gradient for a trained parameter."""
        if not self._stages[stage].under_autograd or not gradients:
            return
        parameters = self._weights.parameters(stage, 0)  # of the oldest version
        named = zip(self._stages[stage].parameters, parameters, gradients, strict=True)
        for argument, parameter, gradient in named:
            if parameter.requires_grad and gradient is None:
                raise InputError(
                    f"{argument.target!r} has no gradient in this batch, while other replicas "
                    "may have one; let each loss depend on it, or freeze it: "
                    "parameter.requires_grad_(False)"
                )

    def _gather(self, kinds: Kinds, rows: Rows) -> _Begun:
        """Launch the exchange of a row of each replica."""
        every = {t: row.new_empty(self._group.replicas, row.shape[1]) for t, row in rows.items()}
        with self._explained():
            works = [
                self._pairs.twins._allgather_base(_real(every[dtype]), _real(row))
                for dtype, row in rows.items()
            ]
        return _Begun(kinds, every, works, rows, [])

    def _waited(self, begun: _Begun) -> Rows:
        """Let the current stream wait for collectives, and return what they fill."""
        with self._explained():
            for work in begun.works:
                work.wait()
        return begun.rows

    def _summed(self, stage: int, batch: int, bucket: int) -> tuple[_Begun, Rows]:
        """Wait for a bucket's sums: a row of them for each replica, or only this one's."""
        begun = self._summing.pop((stage, batch, bucket))
        rows = self._waited(begun)
        if self._in_order:
            rows = {dtype: _added(row)[None] for dtype, row in rows.items()}
        return begun, rows

    def _parts_of(self, rows: Rows, kinds: Kinds) -> list[Pieces]:
        """Replica → its parts of tensors."""
        replicas = range(self._group.replicas)
        return [_pieces(rows, replica, kinds, replica, len(replicas)) for replica in replicas]


def rows_of(parts: Sequence[Sequence[Tensor | None]], kinds: Kinds, replicas: int) -> Rows:
    """A row for each part of tensors of these kinds, which are cut for so many replicas. Raises
    InputError if one is sparse."""
    if any(x is not None and x.layout is not torch.strided for part in parts for x in part):
        raise InputError(
            "a sparse gradient cannot be summed over replicas on these devices; make it dense, as "
            "by nn.Embedding(..., sparse=False)"
        )
    rows = Rows()
    for dtype in dict.fromkeys(kind[0] for kind in kinds if kind is not None):
        longest = max(sum(_sizes(dtype, kinds, r, replicas)) for r in range(replicas))
        flat: list[Tensor] = []
        for part in parts:
            own = [x.reshape(-1) for x in part if x is not None and x.dtype == dtype]
            flat += [*own, own[0].new_zeros(longest - sum(x.numel() for x in own))]
        rows[dtype] = torch.cat(flat).view(len(parts), longest)
    return rows


def _pieces(rows: Rows, at: int, kinds: Kinds, replica: int, replicas: int) -> Pieces:
    """Cut a row into a replica's pieces of tensors of these kinds."""
    found: dict[torch.dtype, Iterator[Tensor]] = {}
    for dtype, each in rows.items():
        sizes = _sizes(dtype, kinds, replica, replicas)
        found[dtype] = iter(each[at, : sum(sizes)].split(sizes))
    return [None if kind is None else next(found[kind[0]]) for kind in kinds]


def _sizes(dtype: torch.dtype, kinds: Kinds, replica: int, replicas: int) -> list[int]:
    counts = [kind[1] for kind in kinds if kind is not None and kind[0] == dtype]
    return [len(part_of(count, replica, replicas)) for count in counts]


def _added(rows: Tensor) -> Tensor:
    """The sum of rows, in their order."""
    total = torch.add(rows[0], rows[1])
    for row in rows[2:]:
        total += row
    return total


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which every backend adds."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
