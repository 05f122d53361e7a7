"""How inductor is to compute on images in channels-last order.

before:  m = mean of x over all images and places, one addition after another
after:   y = permute(x, [0, 2, 3, 1]);  m = sum(sum(sum(y, 2), 1), 0) / count

Of a channel's entries, inductor adds up 4096 in a row there, which rounds ten times as much as on
images in PyTorch's own order, and is slower than to add along one dimension after another. Max
pooling goes to PyTorch's kernels, which take a fifth of the time: what inductor makes of it spends
that on indices. Convolutions do, too: inductor would copy each weight into channels-last order,
and oneDNN needs it in an order of its own. All else is left to inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
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
