"""Which operations alias or write the memory of their arguments, and their functional variants."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fxpipe.torchtools.pytrees import memory

_UNDECLARED = ("_reshape_alias", "_unsafe_view", "unsafe_split", "unsafe_split_with_sizes")
"""Operations whose results are views, though their schemas do not say so."""

IN_PLACE = "fxpipe.in_place"
"""Key of a node's ``custom`` metadata: the model writes its result over the first operand."""

aten = torch.ops.aten

_COPIES = (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.contiguous.default)
"""Operations that copy only where necessary."""


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


def shows_operands(node: fx.Node) -> bool:
    """Whether an operation's result may share memory with its operands.

    It may by its schema, or, as with ``einsum`` or ``meshgrid``, it did so in the trace.
    """
    if not isinstance(node.target, OpOverload):
        return False
    if may_alias(node.target):
        return True
    read = set().union(*map(_storages, node.all_input_nodes))
    return not read.isdisjoint(_storages(node))


def hidden_views(module: fx.GraphModule) -> dict[OpOverload, Callable[..., Any]]:
    """Operation of a graph whose result is a view, against its schema → its decomposition.

    PyTorch has to trace the decomposition, as it would take the result for a copy.
    """
    regions = (part for part in module.modules() if isinstance(part, fx.GraphModule))
    nodes = (node for region in regions for node in region.graph.nodes if shows_operands(node))
    hidden = {node.target for node in nodes if not may_alias(node.target)}
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return {
        target: partial(target._op_dk, composite)
        for target in hidden
        if target.has_kernel_for_dispatch_key(composite)
    }


def _storages(node: fx.Node) -> set[int]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return {memory(x) for x in leaves if isinstance(x, Tensor)}


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


def mark_in_place(module: fx.GraphModule) -> None:
    """Note which operations write over their first operand, see ``IN_PLACE``."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
                node.meta["custom"] = {**node.meta.get("custom", {}), IN_PLACE: True}


def returns_operand(node: fx.Node) -> bool:
    """Whether a node is an operation of ``_COPIES`` that returns its first operand uncopied."""
    forced = True in node.args[2:] or node.kwargs.get("copy")
    return node.target in _COPIES and not forced and same_layout(node, node.all_input_nodes[0])
