"""Write a diagonal by a mask.

PyTorch makes an ``as_strided_scatter`` of it, whose gradient is that of the diagonal, not that of
the rest.

before:  fill_diagonal_(x, 0)
after:   mask = triu(tril(ones_like(x)));  masked_fill_(x, mask, 0)
"""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from fxpipe.torchtools.source import call_like

aten = torch.ops.aten


def mask_diagonals(module: fx.GraphModule) -> None:
    """Replace every ``fill_diagonal_`` of a matrix that does not wrap.

    Args:
        module: an exported graph, with its regions; it is changed.
    """
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        filled = [
            node
            for node in part.graph.find_nodes(
                op="call_function", target=aten.fill_diagonal_.default
            )
            if node.args[0].meta["val"].dim() == 2 and not any(node.args[2:])
        ]
        for node in filled:
            with part.graph.inserting_before(node):
                node.replace_all_uses_with(_masked(node))
            part.graph.erase_node(node)
        if filled:
            part.graph.lint()
            part.recompile()


def _masked(filled: fx.Node) -> fx.Node:
    x, value = filled.args[:2]
    make = partial(call_like, filled)
    assert isinstance(x, fx.Node)
    with x.meta["val"].fake_mode, torch.no_grad():
        every = make(aten.ones_like.default, x, dtype=torch.bool)
        mask = make(aten.triu.default, make(aten.tril.default, every))
        return make(aten.masked_fill_.Scalar, x, mask, value)
