"""Rewrite what an exported graph would lose when it is made functional.

before:  region(no grad): y = relu(x);  z.detach_()
after:   y = relu(x);  cut = detach(y);  d = detach(z), which later nodes read

before:  fill_diagonal_(x, 0)
after:   mask = triu(tril(ones_like(x)));  masked_fill_(x, mask, 0)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def detach_without_grad(module: fx.GraphModule) -> None:
    """Cut the gradient of what a ``torch.no_grad()`` region computes.

    The exporter keeps such a region as a subgraph, but inlines it when it decomposes, and the
    gradient would then flow through.
    """
    region = torch.ops.higher_order.wrap_with_set_grad_enabled
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not region or node.args[0]:
            continue
        for item in list(node.users):
            with module.graph.inserting_after(item):
                cut = module.graph.call_function(torch.ops.aten.detach.default, (item,))
            cut.meta.update(item.meta)
            item.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)


def detach_in_place(module: fx.GraphModule) -> None:
    """Write ``x.detach_()`` as ``detach``, whose result later nodes read instead of ``x``.

    ``run_decompositions`` drops it. That is right for a constant, which has no gradient.
    """
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in list(module.graph.nodes):
        source = node.args[0] if node.target is aten.detach_.default else None
        if not isinstance(source, fx.Node) or source.target is aten.lift_fresh_copy.default:
            continue
        node.target = aten.detach.default
        for user in list(source.users):
            if order[user] > order[node]:
                user.replace_input_with(source, node)


def mask_diagonals(module: fx.GraphModule) -> None:
    """Replace every ``fill_diagonal_`` of a matrix that does not wrap, in regions, too.

    PyTorch makes an ``as_strided_scatter`` of it, whose gradient is that of the diagonal, not that
    of the rest.
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
    make = partial(_call_like, filled)
    assert isinstance(x, fx.Node)
    with x.meta["val"].fake_mode, torch.no_grad():
        every = make(aten.ones_like.default, x, dtype=torch.bool)
        mask = make(aten.triu.default, make(aten.tril.default, every))
        return make(aten.masked_fill_.Scalar, x, mask, value)


def _call_like(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call at the place where its graph inserts, with the line of another node, and with the
    value that it gives for the values of its operands."""
    made = node.graph.call_function(target, args, kwargs)
    made.meta.update({key: each for key, each in node.meta.items() if key != "val"})
    made.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return made
