"""Where gradients end, written so that an exported graph stays so when it is made functional.

before:  region(no grad): y = relu(x);  z.detach_()
after:   y = relu(x);  cut = detach(y);  d = detach(z), which later nodes read
"""

from __future__ import annotations

import torch
from torch import fx


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
    aten = torch.ops.aten
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in list(module.graph.nodes):
        source = node.args[0] if node.target is aten.detach_.default else None
        if not isinstance(source, fx.Node) or source.target is aten.lift_fresh_copy.default:
            continue
        node.target = aten.detach.default
        for user in list(source.users):
            if order[user] > order[node]:
                user.replace_input_with(source, node)
