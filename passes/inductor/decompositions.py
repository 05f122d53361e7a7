"""How inductor is to compute on images in channels-last order, and where indices say where to add.

before:  m = mean of x over all images and places, one addition after another
after:   y = permute(x, [0, 2, 3, 1]);  m = sum(sum(sum(y, 2), 1), 0) / count

Of a channel's entries, inductor adds up 4096 in a row there, which rounds ten times as much as on
images in PyTorch's own order, and is slower than to add along one dimension after another. Max
pooling goes to PyTorch's kernels, which take a fifth of the time: what inductor makes of it spends
that on indices. Convolutions do, too: inductor would copy each weight into channels-last order,
and oneDNN needs it in an order of its own. All else is left to inductor.

before:  m = index_put(x, [i], rows, accumulate=True)             threads add side by side
after:   m = scatter_add(x, 0, expand(unsqueeze(i, 1)), rows)     in the order of the rows

Threads of inductor's code add such rows, as of the gradient of an embedding, by atomic additions,
in an order that differs from call to call, and so would the last bits of gradients. Where there are
several, it leaves what is scattered to PyTorch's kernel, which keeps the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._inductor import config
from torch._inductor.decomposition import decompositions
from torch._inductor.lowering import (
    constrain_to_fx_strides,
    fallback_handler,
    lowerings,
    register_lowering,
)
from torch._inductor.virtualized import V

aten = torch.ops.aten

_AS_THEY_ARE = {
    aten.convolution.default: 0,
    aten.max_pool2d_with_indices.default: 0,
    aten.max_pool2d_with_indices_backward.default: 1,
}
"""Operators that go to PyTorch's kernels → which operand are the images."""


def register() -> None:
    """Have inductor do so in this process from now on."""
    norm = aten._native_batch_norm_legit_functional.default
    backward = aten.native_batch_norm_backward.default
    _decompose(norm, _norm, lambda args: _laid(args[0]) and args[5])
    _decompose(backward, _norm_backward, lambda args: _laid(args[1]) and args[7])
    for operator, at in _AS_THEY_ARE.items():
        if operator in decompositions:
            _decompose(operator, _stay, lambda args, at=at: _laid(args[at]))  # type: ignore[misc]
        if operator in lowerings:
            _lower(operator, at)
    masked = aten._unsafe_masked_index_put_accumulate.default
    decompositions[masked] = decomposition_table[masked]
    _decompose(masked, _stay, lambda args: not _several(args[0]))
    for operator in (aten.index_put.default, aten._unsafe_index_put.default):
        decompositions[operator] = _put


def _decompose(operator: Any, ours: Callable[..., Any], takes: Callable[[Any], bool]) -> None:
    theirs = decompositions[operator]

    def choose(*args: Any, **kwargs: Any) -> Any:
        return (ours if takes(args) else theirs)(*args, **kwargs)

    decompositions[operator] = choose


def _lower(operator: Any, at: int) -> None:
    theirs, call = lowerings[operator], fallback_handler(operator, add_to_fallback_set=False)

    def choose(*args: Any, **kwargs: Any) -> Any:
        node: Any = V.graph.current_node
        if not _laid(node.args[at].meta["val"]):
            return theirs(*args, **kwargs)
        args, kwargs = constrain_to_fx_strides(node, *args, **kwargs)
        return call(*args, **kwargs)

    register_lowering(operator, type_promotion_kind=None)(choose)


def _laid(value: Any) -> bool:
    """Whether a value is images in channels-last order, on the CPU and in single precision."""
    return (
        isinstance(value, Tensor)
        and value.dim() == 4
        and value.device.type == "cpu"
        and value.dtype is torch.float32
        and value.is_contiguous(memory_format=torch.channels_last)
        and not value.is_contiguous()
    )


def _stay(*args: Any, **kwargs: Any) -> Any:
    """Leaves an operation as it is."""
    return NotImplemented


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    count = x.numel() / x.shape[1]
    mean = _sums(x) / count
    centred = x - _spread(mean)
    variance = _sums(centred * centred) / count
    inverse = torch.rsqrt(variance + eps)
    made = centred * _spread(inverse)
    made = made if weight is None else made * _spread(weight)
    made = made if bias is None else made + _spread(bias)
    new_mean = momentum * mean + (1 - momentum) * running_mean
    unbiased = variance * (count / max(count - 1, 1))
    return made, mean, inverse, new_mean, momentum * unbiased + (1 - momentum) * running_var


def _norm_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    training: bool,
    eps: float,
    wanted: list[bool],
) -> Any:
    count = x.numel() / x.shape[1]
    centred = x - _spread(mean)
    total, product = _sums(gradient), _sums(gradient * centred)
    share = centred * _spread(inverse * inverse * (product / count))
    factor = inverse if weight is None else inverse * weight
    found = (gradient - _spread(total / count) - share) * _spread(factor)
    each = found, product * inverse, total
    return tuple(made if asked else None for made, asked in zip(each, wanted, strict=True))


def _sums(x: Tensor) -> Tensor:
    """The sum of each channel, along one dimension after another."""
    return x.permute(0, 2, 3, 1).sum(2).sum(1).sum(0)


def _spread(x: Tensor) -> Tensor:
    return x[:, None, None]


aten = torch.ops.aten


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
