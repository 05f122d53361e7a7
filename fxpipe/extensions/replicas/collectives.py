"""Sums over the N replicas by the collectives of torch.distributed.

The ranks with the same device in all replicas have a process group. All of them run the same list,
so they launch the same collectives in the same order. A collective follows what is launched on the
compute stream and runs beside it; that stream, or a CPU device, waits where the list waits for
sums or weights.

Gradients of one data type lie one behind the other in N rows, one for each replica. Each receives
its row from all others, adds up the N contributions 0, 1, 2 …, and sends the sum to all others. So
a rank sends 2(N − 1)/N of the bytes of its gradients, as in a sum by the backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.extensions.ranks.channels import explained
from fxpipe.extensions.ranks.group import RankGroup
from fxpipe.extensions.ranks.pairs import PairGroups
from fxpipe.extensions.replicas.exchanges import part_of
from fxpipe.ir.traced import DeferredNorm
from fxpipe.parts import Parts
from fxpipe.runtime.interpreter import Machine

T = TypeVar("T")

Kinds = Sequence[Tensor | None]
"""Tensors whose shapes, data types and strides count; None where there is none."""

Rows = dict[torch.dtype, Tensor]
"""Data type → rows, a tensor of two dimensions, the last one filled up."""


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
    """What the replicas exchange in one run.

    Attributes:
        group: the ranks.
        pairs: has the process group of the replicas, ``pairs.twins``.
        stopped: is set when the run is stopped.
        begun: what has begun and is waited for later, by extensions.
    """

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
        self.group, self.pairs, self.stopped = group, pairs, stopped
        self._in_order = in_order or pairs.device.type == "cpu"
        self.begun: dict[Any, Any] = {}
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
        refuse_missing(machine, stage, bucket, gradients)
        replica, replicas = self.group.replica, self.group.replicas
        kinds = [None if x is None else torch.empty_like(x, device="meta") for x in gradients]
        given = rows_of(gradients, replicas)
        gradients.clear()  # only the rows are kept
        for dtype, row in given.items():
            count = sum(_sizes(dtype, kinds))
            own = len(part_of(count, replica, replicas))
            self.group.summed += row.itemsize * (count - own + own * (replicas - 1))
        rows, works, twins = Rows(), [], self.pairs.twins
        with explained(self.stopped):
            for dtype, row in given.items():
                if self._in_order:
                    rows[dtype] = torch.empty_like(row)
                    work = twins.alltoall_base(as_bytes(rows[dtype]), as_bytes(row), [], [])
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
        return merged([tensors_of(self._waited(each), each.kinds) for each in summed])

    def gather_weights(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Send each trained parameter of a stage from the replica that has updated it to all
        others, in place. Raises like ``all_gather``."""
        here, replicas = self.group.replica, self.group.replicas
        works: list[Any] = []
        copied: list[tuple[Tensor, Tensor]] = []
        with explained(self.stopped):
            for parameter, of in zip(parameters, self.group.deal(names, parameters), strict=True):
                if not parameter.requires_grad or not parameter.numel():
                    continue
                value = parameter.detach()
                row = value.reshape(-1)  # a copy, if it is not contiguous
                if of == here:
                    self.group.summed += value.nbytes * (replicas - 1)
                elif row.data_ptr() != value.data_ptr() or not value.is_contiguous():
                    copied.append((value, row))
                works.append(self.broadcast(row, of))
            for work in works:
                work.wait()
        for value, row in copied:
            value.copy_(row.view(value.shape))

    def pool(
        self, values: dict[str, Tensor], deferred: Sequence[DeferredNorm]
    ) -> dict[str, Tensor]:
        """Wait for the buffers that the devices of all replicas have written in a step, and join
        them: the moments of deferred BatchNorms are merged, every other buffer is the first
        replica's."""
        names = sorted(values)
        own = [values[name] for name in names]
        rows = rows_of(own, 1)
        if deferred:
            rows = self._waited(self._gather(own, rows))
        else:
            with explained(self.stopped):
                for work in [self.broadcast(row, 0) for row in rows.values()]:
                    work.wait()
        found = []
        for replica in range(self.group.replicas if deferred else 1):
            theirs = tensors_of({dtype: row[replica] for dtype, row in rows.items()}, own)
            found.append({n: x for n, x in zip(names, theirs, strict=True) if x is not None})
        moments = [norm.moments for norm in deferred if norm.moments in found[0]]
        if not moments:
            return found[0]
        merge = Parts.merged_moments.find("deferred BatchNorm over replicas")
        return found[0] | {name: merge([values[name] for values in found]) for name in moments}

    def _gather(self, kinds: Kinds, rows: Rows) -> _Begun:
        """Launch the exchange of a row of each replica."""
        every = {t: row.new_empty(self.group.replicas, row.shape[1]) for t, row in rows.items()}
        works: list[Any] = []
        with explained(self.stopped):
            for dtype, row in rows.items():
                if self.pairs.device.type == "cpu":  # gloo's all-gather takes the memory twice
                    every[dtype][self.group.replica] = row[0]
                    works += [self.broadcast(each, r) for r, each in enumerate(every[dtype])]
                else:
                    into = as_bytes(every[dtype])
                    works.append(self.pairs.twins._allgather_base(into, as_bytes(row)))
        return _Begun(kinds, every, works, rows)

    def broadcast(self, row: Tensor, replica: int) -> Any:
        """Launch the sending of a row of one replica to all others."""
        options = dist.BroadcastOptions()  # type: ignore[attr-defined,unused-ignore]
        options.rootRank = replica
        return self.pairs.twins.broadcast([as_bytes(row)], options)

    def _waited(self, begun: _Begun) -> Rows:
        """Let the current stream wait for collectives, and return what they fill."""
        with explained(self.stopped):
            for work in begun.works:
                work.wait()
        return begun.rows

    def _summed(self, stage: int, batch: int, bucket: int) -> _Begun:
        """Wait for a bucket's sums: a row of them for each replica, or only this one's."""
        begun = self._summing.pop((stage, batch, bucket))
        rows = self._waited(begun)
        if self._in_order:
            rows = {dtype: added(row)[None] for dtype, row in rows.items()}
        return _Begun(begun.kinds, rows)


def refuse_missing(
    machine: Machine, stage: int, bucket: int, gradients: Sequence[Tensor | None]
) -> None:
    """Raise InputError if autograd has found no gradient for a trained parameter of a bucket."""
    of = machine.stages[stage]
    if not of.calls or not gradients:
        return
    trained = machine.weights.trained(stage)
    for place in of.buckets[bucket] if of.buckets else range(len(gradients)):
        argument = of.parameters[place]
        if trained[place] and gradients[place] is None:
            raise InputError(
                f"{argument.target!r} has no gradient in this batch, while other replicas "
                "may have one; let each loss depend on it, or freeze it: "
                "parameter.requires_grad_(False)"
            )


def merged(lists: Sequence[list[T | None]]) -> list[T | None]:
    """Merge lists of the same length: at each place the first entry that is not None."""
    return [next((x for x in at if x is not None), None) for at in zip(*lists, strict=True)]


def rows_of(tensors: Kinds, count: int) -> Rows:
    """Lay tensors one behind the other, in new memory of so many rows for each data type."""
    rows = Rows()
    for dtype in dict.fromkeys(x.dtype for x in tensors if x is not None):
        flat = [x.detach().reshape(-1) for x in tensors if x is not None and x.dtype == dtype]
        row = -(-sum(_sizes(dtype, tensors)) // count)
        fill = flat[0].new_zeros(count * row - sum(_sizes(dtype, tensors)))
        rows[dtype] = torch.cat([*flat, fill]).view(count, row)
    return rows


def tensors_of(rows: Rows, kinds: Kinds) -> list[Tensor | None]:
    """Cut rows into tensors of these kinds, in memory of their own."""
    pieces: dict[torch.dtype, Iterator[Tensor]] = {}
    for dtype, each in rows.items():
        sizes = _sizes(dtype, kinds)
        pieces[dtype] = iter(each.flatten()[: sum(sizes)].split(sizes))
    found: list[Tensor | None] = []
    for kind in kinds:
        if kind is None:
            found.append(None)
            continue
        piece = next(pieces[kind.dtype]).view(kind.shape)
        found.append(torch.empty_like(kind, device=piece.device).copy_(piece))
    return found


def _sizes(dtype: torch.dtype, kinds: Kinds) -> list[int]:
    return [kind.numel() for kind in kinds if kind is not None and kind.dtype == dtype]


def added(rows: Tensor) -> Tensor:
    """The sum of rows, in their order."""
    total = torch.add(rows[0], rows[1])
    for row in rows[2:]:
        total += row
    return total


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which every backend adds."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_bytes(dense: Tensor) -> Tensor:
    """The memory of a dense tensor as bytes, which every backend moves."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
