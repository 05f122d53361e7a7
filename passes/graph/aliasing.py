"""Which operations alias or write the memory of their arguments, and their functional variants."""

from __future__ import annotations

import operator
from functools import cache

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

_UNDECLARED = ("_reshape_alias", "_unsafe_view", "unsafe_split", "unsafe_split_with_sizes")
"""Operations whose results are views, though their schemas do not say so."""

aten = torch.ops.aten


@cache
def may_alias(target: OpOverload) -> bool:
    """Whether an operation's result may share memory with its arguments."""
    return target._schema.name.removeprefix("aten::") in _UNDECLARED or any(
        result.alias_info is not None for result in target._schema.returns
    )


def is_view(node: fx.Node) -> bool:
    """Whether a node's value is a view of its first argument, or an item of it."""
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    aliases = (value.alias_info for value in node.target._schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliases)


def same_layout(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes' tensors have the same dtype, device, shape and strides."""
    a, b = node.meta.get("val"), other.meta.get("val")
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)
        and a.stride() == b.stride()
    )


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def fits_both_formats(node: fx.Node) -> bool:
    """Whether a node's tensor is contiguous in both memory formats, because of dimensions of size
    1. Kernels choose the strides of these, and a trace does not know which they choose."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() not in _FORMATS or 1 not in value.shape:
        return False
    both = torch.contiguous_format, _FORMATS[value.dim()]
    return all(value.is_contiguous(memory_format=each) for each in both)
