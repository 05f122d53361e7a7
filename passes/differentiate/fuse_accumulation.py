"""Let a matrix product that makes a parameter's gradient add it to the sum itself.

before:  m = mm(g, x);  a = t(m);  b = t(a);  s = onto(total, b)
after:   s = product_onto(total, g, x)

One kernel reads and writes the sum instead of two, and the gradient never exists by itself. The
result is the same to rounding, no longer to the bit: the kernel may begin its sum with the total.
Known as gradient accumulation fusion from Megatron-LM.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir.plan import Plan
from fxpipe.kernels.graph import GraphKernel, onto
from fxpipe.passes.graph.lazy_module import lazy_module

aten = torch.ops.aten

_VIEWS = {aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default}


def fuse_accumulation(plan: Plan) -> Plan:
    """Fuse in every stage's backward, or its weight-gradient half. Not in stages under autograd."""
    stages = (
        replace(stage, kernel=stage.kernel.mapped(_fused))
        if isinstance(stage.kernel, GraphKernel)
        else stage
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def product_onto(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """A sum with ``a @ b`` added, in place; the first product is the sum itself.

    Args:
        total: of the product's shape, or None.
        a: a matrix, or a batch of matrices.
        b: the same.
    """
    if total is None:
        return a @ b
    return total.addmm_(a, b) if a.dim() == 2 else total.baddbmm_(a, b)


def _fused(module: fx.GraphModule) -> fx.GraphModule:
    sums = module.graph.find_nodes(op="call_function", target=onto)
    if not any(_product(node) for node in sums):
        return module
    graph = deepcopy(module.graph)
    for node in graph.find_nodes(op="call_function", target=onto):
        if (product := _product(node)) is None:
            continue
        # where the product was: its operands may be written over right after it
        with graph.inserting_before(product):
            fused = graph.call_function(product_onto, (node.args[0], *product.args))
        fused.meta.update(node.meta)
        node.replace_all_uses_with(fused)
        dead: Any = node
        while dead is not product:
            source = dead.args[-1] if dead is node else dead.args[0]
            graph.erase_node(dead)
            dead = source
        graph.erase_node(product)
    graph.lint()
    return lazy_module(module, graph, type(module).__name__)


def _product(node: fx.Node) -> fx.Node | None:
    """The product that makes the gradient of a sum, if nothing else reads it."""
    gradient: Any = node.args[1]
    source: Any = gradient
    while source.target in _VIEWS and len(source.users) == 1:
        source = source.args[0]
    if source.target not in (aten.mm.default, aten.bmm.default) or len(source.users) != 1:
        return None
    ours, theirs = source.meta.get("val"), gradient.meta.get("val")
    alike = (
        isinstance(ours, Tensor)
        and isinstance(theirs, Tensor)
        and (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
    )
    return source if alike else None
