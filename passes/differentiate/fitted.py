"""What runs in the place of some operations of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten


def rnn_layer_with_workspace(*args: Any) -> Any:
    """``aten.mkldnn_rnn_layer`` with the workspace that its backward reads, which it returns only
    where gradients are enabled."""
    args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
    with torch.enable_grad():
        return aten.mkldnn_rnn_layer.default(*args)


@wraps(aten.native_group_norm.default, (), ())  # who asks for the schema sees PyTorch's
def group_norm(x: Tensor, *args: Any) -> Any:
    """``aten.native_group_norm`` of a tensor with any strides."""
    return aten.native_group_norm.default(x.contiguous(memory_format=_order(x)), *args)


@wraps(aten.native_group_norm_backward.default, (), ())
def group_norm_backward(gradient: Tensor, x: Tensor, *args: Any) -> Any:
    """``aten.native_group_norm_backward`` of tensors with any strides."""
    order = _order(x)
    given = gradient.contiguous(memory_format=order), x.contiguous(memory_format=order)
    return aten.native_group_norm_backward.default(*given, *args)


def _order(x: Tensor) -> torch.memory_format:
    """The memory format that ``torch.group_norm`` computes in."""
    return suggest_memory_format(x) if x.is_cpu else torch.contiguous_format


FITTED: Mapping[Any, Any] = {
    aten.mkldnn_rnn_layer.default: rnn_layer_with_workspace,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.view.default: aten.reshape.default,
}
"""Operation of a trace → what runs in its place: graphs run without gradients, and with tensors of
other strides, as PyTorch chooses those of dimensions of size 1 by the kernel."""
