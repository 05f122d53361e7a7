"""Make the writes of an InstanceNorm to its running statistics explicit in the graph.

before:  y = instance_norm(x, w, b, mean, var, True, 0.1, 1e-05, False)
after:   m = repeat(mean, [n]);  v = repeat(var, [n]);  …
         z = batch_norm(view(x, [1, n * c, …]), …, m, v, True, 0.1, 1e-05, False)
         copy_(mean, mean(view(m, [n, c]), 0));  copy_(var, mean(view(v, [n, c]), 0))
         y = view(z, shape of x)

The operation writes its statistics, but its schema does not say so, so that the writes would be
lost. It is replaced by its own definition in PyTorch: n samples of c channels as n * c channels.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def open_instance_norms(module: fx.GraphModule) -> None:
    """Replace every InstanceNorm that updates its statistics.

    Args:
        module: an exported graph; it is changed.
    """
    opened = [
        node
        for node in module.graph.nodes
        if node.target is aten.instance_norm.default and node.args[3] is not None and node.args[5]
    ]
    for node in opened:
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(_open(module.graph, node))
        module.graph.erase_node(node)
    if opened:
        module.graph.lint()
        module.recompile()


def _open(graph: fx.Graph, norm: fx.Node) -> fx.Node:
    x, weight, bias, mean, variance, _, momentum, eps, cudnn = norm.args

    def make(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta.update({k: v for k, v in norm.meta.items() if k != "val"})
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    assert isinstance(x, fx.Node)
    with x.meta["val"].fake_mode, torch.no_grad():
        sizes: list[Any] = [
            make(aten.sym_size.int, x, dim) if isinstance(size, torch.SymInt) else size
            for dim, size in enumerate(x.meta["val"].shape)
        ]
        n, c, *rest = sizes
        channels = make(operator.mul, n, c) if isinstance(n, fx.Node) else n * c
        weight, bias, means, variances = (
            None if each is None else make(aten.repeat.default, each, [n])
            for each in (weight, bias, mean, variance)
        )
        flat = make(aten.view.default, make(aten.contiguous.default, x), [1, channels, *rest])
        normed = make(
            aten.batch_norm.default,
            *(flat, weight, bias, means, variances, True, momentum, eps, cudnn),
        )
        for each, updated in ((mean, means), (variance, variances)):
            rows = make(aten.view.default, updated, [n, c])
            make(aten.copy_.default, each, make(aten.mean.dim, rows, [0]))
        return make(aten.view.default, normed, sizes)
