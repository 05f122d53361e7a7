"""How the replicas exchange weights and gradients of which each keeps a share.

A parameter that another replica keeps is on the meta device between uses, as the parameters of
other ranks' stages are. It stays the same object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxpipe.extensions.ranks.channels import explained
from fxpipe.extensions.replicas.collectives import (
    Collectives,
    added,
    as_bytes,
    merged,
    refuse_missing,
)
from fxpipe.ir.value import Buffer
from fxpipe.torchtools.meta import become

if TYPE_CHECKING:
    from fxpipe.runtime.interpreter import Machine


def begin_gather(machine: Machine, stage: int) -> None:
    """Launch the sending of each of a stage's parameters from the replica that keeps it to all
    others, into new memory."""
    replicas, parameters = _replicas(machine), _parameters(machine, stage)
    here, count = replicas.group.replica, replicas.group.replicas
    works: list[Any] = []
    came: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad(), explained(replicas.stopped):
        for parameter, of in zip(parameters, _owners(machine, stage), strict=True):
            value = parameter.detach()
            dense = torch.empty_like(value, device=replicas.pairs.device)
            if of != here:
                came.append((parameter, dense))
            elif dense.stride() == value.stride():
                dense = value
            else:
                dense.copy_(value)
            if not parameter.numel():
                continue
            if of == here:
                replicas.group.summed += value.nbytes * (count - 1)
            works.append(replicas.broadcast(as_bytes(dense), of))
    replicas.begun["weights", stage] = works, came


def await_weights(machine: Machine, stage: int) -> None:
    """Let the parameters be whole, once they have come. Raises Stopped when the run is stopped."""
    replicas = _replicas(machine)
    works, came = replicas.begun.pop(("weights", stage))
    with explained(replicas.stopped):
        for work in works:
            work.wait()
    for parameter, value in came:
        become(parameter, value)


def drop_others(machine: Machine, stage: int) -> None:
    """Give back the memory of the parameters that other replicas keep."""
    replicas = _replicas(machine)
    owners = _owners(machine, stage)
    for parameter, of in zip(_parameters(machine, stage), owners, strict=True):
        if of != replicas.group.replica:
            become(parameter, torch.empty_like(parameter, device="meta"))


def begin_reduce(
    machine: Machine, stage: int, batch: int, bucket: int, gradients: list[Tensor | None]
) -> None:
    """Launch the sending of each gradient of a bucket to the replica that updates its parameter.
    The list is emptied. Raises InputError as ``Collectives.reduce_scatter``."""
    replicas, owners = _replicas(machine), _owners(machine, stage)
    refuse_missing(machine, stage, bucket, gradients)
    here, count = replicas.group.replica, replicas.group.replicas
    kinds = [
        torch.empty_like(g, device="meta") if g is not None and of == here else None
        for g, of in zip(gradients, owners, strict=False)
    ]
    rows = {
        dtype: _rows(gradients, owners, count, dtype)
        for dtype in dict.fromkeys(g.dtype for g in gradients if g is not None)
    }
    gradients.clear()  # only the rows are kept
    begun = []
    with explained(replicas.stopped):
        for dtype, (given, sizes) in rows.items():
            came = given.new_empty(count, sizes[here])
            splits = [size * given.itemsize for size in sizes]
            replicas.group.summed += sum(splits) - splits[here]
            work = replicas.pairs.twins.alltoall_base(
                as_bytes(came), as_bytes(given), [splits[here]] * count, splits
            )
            begun.append((dtype, work, given, came))
    replicas.begun["gradients", stage, machine.step + batch, bucket] = kinds, begun


def _rows(
    gradients: Sequence[Tensor | None], owners: Sequence[int], count: int, dtype: torch.dtype
) -> tuple[Tensor, list[int]]:
    """The gradients of one data type in new memory, those of each replica together in order, and
    how many elements each has."""
    of_type = [g is not None and g.dtype == dtype for g in gradients]
    dealt = [*zip(gradients, owners, of_type, strict=False)]
    parts = [
        [g.detach().reshape(-1) for g, of, fits in dealt if g is not None and fits and of == r]
        for r in range(count)
    ]
    sizes = [sum(part.numel() for part in each) for each in parts]
    return torch.cat([part for each in parts for part in each]), sizes


def await_sums(
    machine: Machine, stage: int, batch: int, buckets: Mapping[int, int]
) -> list[Tensor | None]:
    """The sums, in the order of the replicas, of the gradients that this one sums; None for all
    others. Raises Stopped when the run is stopped."""
    every = range(-1, buckets.get(stage, 1) - 1)
    return merged([_summed(machine, stage, machine.step + batch, bucket) for bucket in every])


def _summed(machine: Machine, stage: int, batch: int, bucket: int) -> list[Tensor | None]:
    """The same of a bucket."""
    replicas = _replicas(machine)
    kinds, begun = replicas.begun.pop(("gradients", stage, batch, bucket))
    sums: dict[torch.dtype, Tensor] = {}
    with explained(replicas.stopped):
        while begun:
            dtype, work, given, came = begun.pop()
            work.wait()
            sums[dtype] = added(came)
            del work, given, came  # before the sums are cut into tensors of their own
    found: list[Tensor | None] = []
    for kind in kinds:
        if kind is None:
            found.append(None)
            continue
        taken, sums[kind.dtype] = sums[kind.dtype].tensor_split([kind.numel()])
        like = torch.empty_like(kind, device=taken.device)
        found.append(like.copy_(taken.view(kind.shape)))
    return found


def share_norms(machine: Machine, stage: int, buffers: Sequence[Buffer]) -> None:
    """Complete a stage's norms in these buffers by those of the other replicas."""
    replicas, values = _replicas(machine), machine.store.values
    own: Sequence[Tensor | None] = values[buffers[0]]
    here, count, device = replicas.group.replica, replicas.group.replicas, replicas.pairs.device
    every = torch.zeros(count, 2, len(own), dtype=torch.float64, device=device)
    for at, norm in enumerate(own):
        if norm is not None:
            every[here, :, at] = torch.stack([torch.ones_like(norm), norm]).double()
    with explained(replicas.stopped):
        for work in [replicas.broadcast(as_bytes(row), of) for of, row in enumerate(every)]:
            work.wait()
    there, norms = every[:, 0].sum(0).tolist(), every[:, 1].sum(0)
    of = [_norm_dtype(parameter.dtype) for parameter in _parameters(machine, stage)]
    whole = [norms[at].to(of[at]) if there[at] else None for at in range(len(own))]
    values.update(dict.fromkeys(buffers, whole))


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _replicas(machine: Machine) -> Collectives:
    replicas: Collectives = machine.channels.replicas
    return replicas


def _parameters(machine: Machine, stage: int) -> Sequence[Tensor]:
    return machine.weights.parameters(stage, machine.step)


def _owners(machine: Machine, stage: int) -> list[int]:
    names = [argument.target for argument in machine.stages[stage].parameters]
    return _replicas(machine).group.deal(names, _parameters(machine, stage))
