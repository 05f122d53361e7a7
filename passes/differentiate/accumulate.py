"""Add every gradient of a parameter to its sum over micro-batches as soon as it is computed.

before:  a = mm(g, x);  b = sum(g);  c = mm(g, w);  return (c, a, b)
after:   a = mm(g, x);  t = onto(total_a, a);  b = sum(g);  u = onto(total_b, b);  c = mm(g, w);
         return (c, t, u)                      total_a and total_b are inputs, None at first

A gradient is then added while it is in the cache, and freed at once: the gradients never exist all
together beside their sums. The sums are the same to the bit.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpipe.kernels.graph import onto

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
