"""Which operations alias or write the memory of their arguments, and their functional variants."""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload

_UNDECLARED = ("_reshape_alias", "_unsafe_view", "unsafe_split", "unsafe_split_with_sizes")
"""Operations whose results are views, though their schemas do not say so."""


def may_alias(target: OpOverload) -> bool:
    """Whether an operation's result may share memory with its arguments."""
    return target._schema.name.removeprefix("aten::") in _UNDECLARED or any(
        result.alias_info is not None for result in target._schema.returns
    )


def functional_variant(target: OpOverload) -> OpOverload | None:
    """The out-of-place variant of an in-place operation; None if there is none."""
    namespace, _, name = target._schema.name.partition("::")
    if torch.Tag.nondeterministic_seeded in target.tags or not name.endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    variant = getattr(packet, target._overloadname, None)
    if not isinstance(variant, OpOverload) or variant._schema.is_mutable:
        return None
    same = [(a.name, str(a.type)) for a in target._schema.arguments] == [
        (a.name, str(a.type)) for a in variant._schema.arguments
    ]
    return variant if same and not may_alias(variant) else None


def keeps_type(node: fx.Node, source: fx.Node) -> bool:
    """Whether the functional variant's result has the dtype of the tensor that is written."""
    mine = source.meta.get("val")
    if not isinstance(mine, torch.Tensor):
        return False
    for argument in (*node.args[1:], *node.kwargs.values()):
        value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
        if isinstance(value, torch.Tensor):
            if torch.promote_types(mine.dtype, value.dtype) != mine.dtype:
                return False
            continue
        if isinstance(value, float | torch.SymFloat) and not mine.is_floating_point():
            return False
        if isinstance(value, int | torch.SymInt) and mine.dtype is torch.bool:
            return False
    return True


def same_layout(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes' tensors have the same dtype, device, shape and strides."""
    one, two = node.meta.get("val"), other.meta.get("val")
    return (
        isinstance(one, torch.Tensor)
        and isinstance(two, torch.Tensor)
        and (one.dtype, one.device, one.shape) == (two.dtype, two.device, two.shape)
        and one.stride() == two.stride()
    )
