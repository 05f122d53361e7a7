"""Add every gradient of a parameter to its sum over micro-batches as soon as it is computed.

before:  a = mm(g, x);  b = sum(g);  c = mm(g, w);  return (c, a, b)
after:   a = mm(g, x);  t = onto(total_a, a);  b = sum(g);  u = onto(total_b, b);  c = mm(g, w);
         return (c, t, u)                      total_a and total_b are inputs, None at first

A gradient is then added while it is in the cache, and freed at once: the gradients never exist all
together beside their sums. The sums are the same to the bit.

``fuse_accumulation`` lets the matrix product that computes a parameter's gradient add it to the
sum, known as gradient accumulation fusion from Megatron-LM.

before:  m = mm(g, x);  a = t(m);  b = t(a);  s = onto(total, b)
after:   s = product_onto(total, g, x)

One kernel reads and writes the sum instead of two, and the gradient never exists by itself. The
result is equal up to rounding, no longer to the bit: the kernel may start from the total.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir.plan import Plan
from fxpipe.kernels.graph import GraphKernel, onto
from fxpipe.passes.graph.aliasing import same_layout
from fxpipe.passes.graph.lazy_module import lazy_module

STRIDES_OF_SUM = "fxpipe.strides_of_sum"
"""Key of the metadata of a parameter's gradient: see ``kernels.graph.strides_of_sum``."""


def accumulate(graph: fx.Graph, inputs: int) -> None:
    """Let a graph add the gradients of parameters, which it returns after those of so many
    ``inputs``, to sums. Each of its results must have memory of its own."""
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    gradients = results[inputs:]
    *_, last = graph.find_nodes(op="placeholder")
    totals = []
    for gradient in gradients:
        with graph.inserting_after(last):
            last = graph.placeholder(f"total_{gradient.name}")
        last.target = last.name
        totals.append(last)
    for index, (total, gradient) in enumerate(zip(totals, gradients, strict=True), inputs):
        meta: dict[str, Any] = gradient.meta
        args: tuple[Any, ...] = total, gradient
        if (strides := meta.get(STRIDES_OF_SUM)) is not None:
            value, args = meta["val"], (*args, strides)
            meta = {**meta, "val": value.new_empty_strided(value.shape, strides)}
        with graph.inserting_after(last if gradient.op == "placeholder" else gradient):
            results[index] = graph.call_function(onto, args)
        for node in (total, results[index]):
            node.meta.update(meta)
    output.args = (tuple(results),)


aten = torch.ops.aten

_VIEWS = {aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default}


def fuse_accumulation(plan: Plan) -> Plan:
    """Fuse gradient products with their sums in all backwards, except in stages under autograd."""
    stages = (
        replace(stage, kernel=stage.kernel.mapped(_fused))
        if isinstance(stage.kernel, GraphKernel)
        else stage
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def product_onto(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add ``a @ b`` to a sum in place; without a sum, return the product. ``a`` and ``b`` are
    matrices, or batches of matrices."""
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
        # at the product's place, as its operands may be written over right after it
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
    """The product that computes the gradient which ``onto`` adds, if nothing else reads it."""
    gradient: Any = node.args[1]
    if gradient.meta.get(STRIDES_OF_SUM) is not None:
        return None
    source: Any = gradient
    while source.target in _VIEWS and len(source.users) == 1:
        source = source.args[0]
    if source.target not in (aten.mm.default, aten.bmm.default) or len(source.users) != 1:
        return None
    return source if same_layout(source, gradient) else None
