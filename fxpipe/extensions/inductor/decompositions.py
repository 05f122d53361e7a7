"""Tell inductor how to compute on channels-last images, and how to accumulate at indices.

before:  m = mean of x over all images and places, one addition after another
after:   y = permute(x, [0, 2, 3, 1]);  m = sum(sum(sum(y, 2), 1), 0) / count

For channels-last images, inductor sums up 4096 entries of a channel in a row. That rounds ten times
as much as for contiguous images, and is slower than summing along one dimension after another. Max
pooling goes to PyTorch's kernels, which take a fifth of the time, because inductor's code spends
most on indices. Convolutions go there, too: inductor would copy each weight into channels-last
order, but oneDNN needs an order of its own. Inductor does all the rest.

before:  m = index_put(x, [i], rows, accumulate=True)             threads add in any order
after:   m = scatter_add(x, 0, expand(unsqueeze(i, 1)), rows)     in the order of the rows

With several threads, inductor's code accumulates rows, such as the gradient of an embedding, by
atomic additions. Their order differs from call to call, and so would the last bits of gradients.
PyTorch's kernel for ``scatter_add`` keeps the order.
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
"""Operator that goes to PyTorch's kernels → the position of the images in its arguments."""


def register_decompositions() -> None:
    """Register all decompositions and lowerings of this module with inductor."""
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
    """Use ``ours`` for calls whose arguments it ``takes``, else inductor's own decomposition."""
    theirs = decompositions[operator]

    def choose(*args: Any, **kwargs: Any) -> Any:
        return (ours if takes(args) else theirs)(*args, **kwargs)

    decompositions[operator] = choose


def _lower(operator: Any, at: int) -> None:
    """Call PyTorch's kernel if the argument ``at`` is laid channels-last."""
    theirs, call = lowerings[operator], fallback_handler(operator, add_to_fallback_set=False)

    def choose(*args: Any, **kwargs: Any) -> Any:
        node: Any = V.graph.current_node
        if not _laid(node.args[at].meta["val"]):
            return theirs(*args, **kwargs)
        args, kwargs = constrain_to_fx_strides(node, *args, **kwargs)
        return call(*args, **kwargs)

    register_lowering(operator, type_promotion_kind=None)(choose)


def _laid(value: Any) -> bool:
    """Whether a value is channels-last images on the CPU, in single precision."""
    return (
        isinstance(value, Tensor)
        and value.dim() == 4
        and value.device.type == "cpu"
        and value.dtype is torch.float32
        and value.is_contiguous(memory_format=torch.channels_last)
        and not value.is_contiguous()
    )


def _stay(*args: Any, **kwargs: Any) -> Any:
    """Leave an operation undecomposed."""
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
    y = centred * _spread(inverse)
    y = y if weight is None else y * _spread(weight)
    y = y if bias is None else y + _spread(bias)
    new_mean = momentum * mean + (1 - momentum) * running_mean
    unbiased = variance * (count / max(count - 1, 1))
    return y, mean, inverse, new_mean, momentum * unbiased + (1 - momentum) * running_var


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
    to_x = (gradient - _spread(total / count) - share) * _spread(factor)
    gradients = to_x, product * inverse, total
    return tuple(made if asked else None for made, asked in zip(gradients, wanted, strict=True))


def _sums(x: Tensor) -> Tensor:
    """The sum of each channel, along one dimension after another."""
    return x.permute(0, 2, 3, 1).sum(2).sum(1).sum(0)


def _spread(x: Tensor) -> Tensor:
    return x[:, None, None]


def _several(x: Tensor) -> bool:
    """Whether several threads may add to a tensor."""
    return x.device.type == "cpu" and config.cpp.threads != 1


def _put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Any:
    by_dim = {dim: index for dim, index in enumerate(indices) if index is not None}
    integers = all(index.dtype in (torch.int64, torch.int32) for index in by_dim.values())
    if not (accumulate and by_dim and integers and _several(x)):
        return NotImplemented
    return added(x, by_dim, values)


def added(x: Tensor, indices: dict[int, Tensor], values: Tensor) -> Tensor:
    """Compute an accumulating ``index_put`` with ``scatter_add``.

    Args:
        x: the tensor to add to.
        indices: dimension → indices into it. They broadcast. Their dimensions take the place of the
            indexed ones, or come first if those are not adjacent.
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
    values = values.expand(*others[:at], *row.shape, *others[at:])
    values = values.movedim([*range(at, at + row.dim())], [*range(row.dim())])
    lines = row.reshape(-1, 1).expand(-1, prod(others))
    flat = front.reshape(prod(sizes), prod(others))
    total = flat.scatter_add(0, lines, values.reshape(lines.shape)).reshape(front.shape)
    return total.permute([order.index(dim) for dim in range(x.dim())]).contiguous()
