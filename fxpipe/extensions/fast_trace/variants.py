"""In-place operations and their functional variants."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fxpipe.passes.graph.aliasing import may_alias


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
    written = source.meta.get("val")
    if not isinstance(written, Tensor):
        return False
    for argument in (*node.args[1:], *node.kwargs.values()):
        value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
        if isinstance(value, Tensor):
            if torch.promote_types(written.dtype, value.dtype) != written.dtype:
                return False
        elif isinstance(value, float | torch.SymFloat):
            if not written.is_floating_point():
                return False
        elif isinstance(value, int | torch.SymInt) and written.dtype is torch.bool:
            return False
    return True
