"""Sums over the N replicas by the collectives of torch.distributed.

The ranks with the same device in all replicas have a process group. All of them run the same list,
so they launch the same collectives in the same order. A collective follows what is launched on the
compute stream and runs beside it; that stream, or a CPU device, waits where the list waits for
sums or weights.

A gradient is cut into N parts, one for each replica. In the order of the replicas, each receives
its part from all others, adds up the N contributions 0, 1, 2 …, and sends the sum to all others. So
a rank sends 2(N − 1)/N of the bytes of its gradients, as in a sum by the backend.

Tensors of one data type are sent together, in rows: one for each replica, filled up to the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.ir.value import owners, part_of
from fxpipe.runtime.interpreter import Machine
from fxpipe.runtime.ranks.channels import explained
from fxpipe.runtime.ranks.group import RankGroup
from fxpipe.runtime.ranks.pairs import PairGroups

T = TypeVar("T")

Kinds = Sequence[Tensor | None]
"""Whole tensors, on the meta device; None where there is none."""

Pieces = list[Tensor | None]
"""A replica's part of each tensor."""

Rows = dict[torch.dtype, Tensor]
"""Data type → rows, a tensor of two dimensions."""


class _Begun(NamedTuple):
    """Collectives that were launched.

    Attributes:
        kinds: the tensors of which the rows have parts.
        rows: what the collectives fill.
        works: the collectives.
        given: what they read, which is kept until they are done.
    """

    kinds: Kinds
    rows: Rows
    works: Sequence[Any] = ()
    given: Rows | None = None


class Collectives:
    """What the replicas exchange in one run."""

    def __init__(
        self, group: RankGroup, pairs: PairGroups, stopped: Event, *, in_order: bool
    ) -> None:
        """Make it for the channels of a run.

        Args:
            group: the ranks.
            pairs: has the process group of the replicas.
            stopped: is set when the run is stopped.
            in_order: add the contributions in the order of the replicas, as CPU devices always do,
                not in that of the backend.
        """
        self._group, self._pairs, self._stopped = group, pairs, stopped
        self._in_order = in_order or pairs.device.type == "cpu"
        self._summing: dict[tuple[int, int, int], _Begun] = {}

    def reduce_scatter(
        self, machine: Machine, stage: int, batch: int, gradients: list[Tensor | None], bucket: int
    ) -> None:
        """Start to sum a bucket of a stage's gradients of a batch over the replicas; never waits.

        A gradient is None where its parameter is in another bucket. The last bucket is −1. All
        replicas must have gradients for the same parameters. The list is emptied.

        Raises:
            InputError: autograd has found no gradient for a trained parameter.
        """
        _check(machine, stage, gradients)
        replicas = self._group.replicas
        kinds = [None if x is None else torch.empty_like(x, device="meta") for x in gradients]
        parts = [[_part(x, r, replicas) for x in gradients] for r in range(replicas)]
        given = rows_of(parts, kinds, replicas)
        gradients.clear()  # only the rows are kept
        sizes = [sum(piece.nbytes for piece in part if piece is not None) for part in parts]
        own = sizes[self._group.replica]
        del parts
        self._group.summed += sum(sizes) - own + own * (replicas - 1)
        rows, works, twins = Rows(), [], self._pairs.twins
        with explained(self._stopped):
            for dtype, row in given.items():
                if self._in_order:
                    rows[dtype] = torch.empty_like(row)
                    work = twins.alltoall_base(_bytes(rows[dtype]), _bytes(row), [], [])
                else:
                    rows[dtype] = row
                    work = twins.allreduce([_real(row)])
                works.append(work)
        self._summing[stage, batch, bucket] = _Begun(kinds, rows, works, given)

    def all_gather(self, stage: int, batch: int, buckets: int) -> list[Tensor | None]:
        """Wait for the sums over the replicas of a stage's gradients, which come in ``buckets``
        buckets. Raises Stopped when the run is stopped."""
        summed = [self._summed(stage, batch, bucket) for bucket in range(-1, buckets - 1)]
        if self._in_order:
            summed = [self._gather(each.kinds, each.rows) for each in summed]
        return merged([self._joined(each) for each in summed])

    def gather_weights(self, parameters: Sequence[Tensor]) -> None:
        """Send each trained parameter of a stage from the replica that has updated it to all
        others, in place. Raises like ``all_gather``."""
        here, replicas = self._group.replica, self._group.replicas
        works: list[Any] = []
        copied: list[tuple[Tensor, Tensor]] = []
        with explained(self._stopped):
            for parameter, of in zip(
                parameters, owners([p.nbytes for p in parameters], replicas), strict=True
            ):
                if not parameter.requires_grad or not parameter.numel():
                    continue
                value = parameter.detach()
                row = value.reshape(-1)  # a copy, if it is not contiguous
                if of == here:
                    self._group.summed += value.nbytes * (replicas - 1)
                elif row.data_ptr() != value.data_ptr() or not value.is_contiguous():
                    copied.append((value, row))
                works.append(self._broadcast(row, of))
            for work in works:
                work.wait()
        for value, row in copied:
            value.copy_(row.view(value.shape))

    def pool(self, values: dict[str, Tensor], *, whole: bool) -> list[dict[str, Tensor]]:
        """Wait for the buffers that this rank's device has written in a step: replica → name →
        value. Unless ``whole``, only those of the first replica."""
        names = sorted(values)
        kinds = [torch.empty_like(values[name], device="meta") for name in names]
        rows = rows_of([[values[name] for name in names]], kinds, 1)
        if whole:
            rows = self._waited(self._gather(kinds, rows))
        else:
            with explained(self._stopped):
                for work in [self._broadcast(row, 0) for row in rows.values()]:
                    work.wait()
        return [
            {
                name: piece.view(values[name].shape)
                for name, piece in zip(names, _pieces(rows, replica, kinds, 0, 1), strict=True)
                if piece is not None
            }
            for replica in range(self._group.replicas if whole else 1)
        ]

    def _gather(self, kinds: Kinds, rows: Rows) -> _Begun:
        """Launch the exchange of a row of each replica."""
        every = {t: row.new_empty(self._group.replicas, row.shape[1]) for t, row in rows.items()}
        works: list[Any] = []
        with explained(self._stopped):
            for dtype, row in rows.items():
                if self._pairs.device.type == "cpu":  # gloo's all-gather takes the memory twice
                    every[dtype][self._group.replica] = row[0]
                    works += [self._broadcast(each, r) for r, each in enumerate(every[dtype])]
                else:
                    into = _bytes(every[dtype])
                    works.append(self._pairs.twins._allgather_base(into, _bytes(row)))
        return _Begun(kinds, every, works, rows)

    def _broadcast(self, row: Tensor, replica: int) -> Any:
        """Launch the sending of a row of one replica to all others."""
        options = dist.BroadcastOptions()  # type: ignore[attr-defined,unused-ignore]
        options.rootRank = replica
        return self._pairs.twins.broadcast([_bytes(row)], options)

    def _waited(self, begun: _Begun) -> Rows:
        """Let the current stream wait for collectives, and return what they fill."""
        with explained(self._stopped):
            for work in begun.works:
                work.wait()
        return begun.rows

    def _summed(self, stage: int, batch: int, bucket: int) -> _Begun:
        """Wait for a bucket's sums: a row of them for each replica, or only this one's."""
        begun = self._summing.pop((stage, batch, bucket))
        rows = self._waited(begun)
        if self._in_order:
            rows = {dtype: _added(row)[None] for dtype, row in rows.items()}
        return _Begun(begun.kinds, rows)

    def _parts_of(self, rows: Rows, kinds: Kinds) -> list[Pieces]:
        """Replica → its parts of tensors."""
        replicas = range(self._group.replicas)
        return [_pieces(rows, replica, kinds, replica, len(replicas)) for replica in replicas]

    def _joined(self, begun: _Begun) -> list[Tensor | None]:
        """Wait for the rows of all replicas, and put the tensors together, in memory of their
        own."""
        parts = self._parts_of(self._waited(begun), begun.kinds)
        found: list[Tensor | None] = []
        for kind, *pieces in zip(begun.kinds, *parts, strict=True):
            if kind is None:
                found.append(None)
                continue
            whole = torch.cat([piece for piece in pieces if piece is not None]).view(kind.shape)
            if whole.stride() != kind.stride():
                whole = torch.empty_like(kind, device=whole.device).copy_(whole)
            found.append(whole)
        return found


def _check(machine: Machine, stage: int, gradients: Sequence[Tensor | None]) -> None:
    """Raise InputError if autograd has found no gradient for a trained parameter."""
    of = machine.stages[stage]
    if not of.under_autograd or not gradients:
        return
    parameters = machine.weights.parameters(stage, 0)  # of the oldest version
    for argument, parameter, gradient in zip(of.parameters, parameters, gradients, strict=True):
        if parameter.requires_grad and gradient is None:
            raise InputError(
                f"{argument.target!r} has no gradient in this batch, while other replicas "
                "may have one; let each loss depend on it, or freeze it: "
                "parameter.requires_grad_(False)"
            )


def merged(lists: Sequence[list[T | None]]) -> list[T | None]:
    """Merge lists of the same length: at each place the first entry that is not None."""
    return [next((x for x in at if x is not None), None) for at in zip(*lists, strict=True)]


def rows_of(parts: Sequence[Sequence[Tensor | None]], kinds: Kinds, replicas: int) -> Rows:
    """A row for each part of tensors of these kinds, which are cut for so many replicas."""
    rows = Rows()
    for dtype in dict.fromkeys(kind.dtype for kind in kinds if kind is not None):
        longest = max(sum(_sizes(dtype, kinds, r, replicas)) for r in range(replicas))
        flat: list[Tensor] = []
        for part in parts:
            own = [x.reshape(-1) for x in part if x is not None and x.dtype == dtype]
            flat += [*own, own[0].new_zeros(longest - sum(x.numel() for x in own))]
        rows[dtype] = torch.cat(flat).view(len(parts), longest)
    return rows


def _part(tensor: Tensor | None, replica: int, replicas: int) -> Tensor | None:
    """A replica's part of a tensor: a view of it if possible."""
    if tensor is None:
        return None
    span = part_of(tensor.numel(), replica, replicas)
    return tensor.detach().reshape(-1)[span.start : span.stop]


def _pieces(rows: Rows, at: int, kinds: Kinds, replica: int, replicas: int) -> Pieces:
    """Cut a row into a replica's pieces of tensors of these kinds."""
    found: dict[torch.dtype, Iterator[Tensor]] = {}
    for dtype, each in rows.items():
        sizes = _sizes(dtype, kinds, replica, replicas)
        found[dtype] = iter(each[at, : sum(sizes)].split(sizes))
    return [None if kind is None else next(found[kind.dtype]) for kind in kinds]


def _sizes(dtype: torch.dtype, kinds: Kinds, replica: int, replicas: int) -> list[int]:
    counts = [kind.numel() for kind in kinds if kind is not None and kind.dtype == dtype]
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


def _bytes(rows: Tensor) -> Tensor:
    """Rows as bytes, which every backend moves."""
    return rows.view(torch.uint8)
