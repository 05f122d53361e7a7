"""How inductor is to add where indices say to, such as in the gradient of an embedding.

before:  m = index_put(x, [i], rows, accumulate=True)             threads add side by side
after:   m = scatter_add(x, 0, expand(unsqueeze(i, 1)), rows)     in the order of the rows

Threads of inductor's code add such rows by atomic additions, in an order that differs from call to
call, and so would the last bits of gradients. Where there are several, it leaves what is scattered
to PyTorch's kernel, which keeps the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._inductor import config
from torch._inductor.decomposition import decompositions

aten = torch.ops.aten


def register() -> None:
    """Have inductor do so in this process from now on."""
    masked = aten._unsafe_masked_index_put_accumulate.default
    unmasked = decomposition_table[masked]

    def choose(x: Tensor, *rest: Any) -> Any:
        return unmasked(x, *rest) if _several(x) else NotImplemented

    decompositions[masked] = choose
    for operator in (aten.index_put.default, aten._unsafe_index_put.default):
        decompositions[operator] = _put


def _several(x: Tensor) -> bool:
    """Whether several threads may add to a tensor."""
    return x.device.type == "cpu" and config.cpp.threads != 1


def _put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Any:
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    whole = all(index.dtype in (torch.int64, torch.int32) for index in given.values())
    if not (accumulate and given and whole and _several(x)):
        return NotImplemented
    return added(x, given, values)


def added(x: Tensor, indices: dict[int, Tensor], values: Tensor) -> Tensor:
    """What ``index_put`` makes that accumulates.

    Args:
        x: what is added to.
        indices: dimension → which of its entries; they broadcast, and their dimensions stand in
            the place of the indexed ones, or first where those are apart.
        values: what is added; broadcasts.
    """
    dims = [*indices]
    order = [*dims, *(dim for dim in range(x.dim()) if dim not in indices)]
    front = x.permute(order)
    sizes, others = front.shape[: len(dims)], front.shape[len(dims) :]
    places = torch.broadcast_tensors(*indices.values())
    row = torch.zeros_like(places[0], dtype=torch.int64)
    for place, size in zip(places, sizes, strict=True):
        row = row * size + torch.where(place < 0, place + size, place)
    at = dims[0] if dims[-1] - dims[0] < len(dims) else 0
    found = values.expand(*others[:at], *row.shape, *others[at:])
    found = found.movedim([*range(at, at + row.dim())], [*range(row.dim())])
    lines = row.reshape(-1, 1).expand(-1, prod(others))
    flat = front.reshape(prod(sizes), prod(others))
    made = flat.scatter_add(0, lines, found.reshape(lines.shape)).reshape(front.shape)
    return made.permute([order.index(dim) for dim in range(x.dim())]).contiguous()
