"""Add every gradient of a parameter to the sum over micro-batches as soon as it is made.

before:  a = mm(g, x);  b = sum(g);  c = mm(g, w);  return (c, a, b)
after:   a = mm(g, x);  t = onto(total_a, a);  b = sum(g);  u = onto(total_b, b);  c = mm(g, w);
         return (c, t, u)                      total_a and total_b are inputs, None at first

A gradient is then added while it lies in the cache, and freed at once: all of them together never
live beside their sums. The sum is the same to the bit.
"""

from __future__ import annotations

from torch import fx

from fxpipe.kernels.graph import onto


def accumulate(graph: fx.Graph, inputs: int) -> None:
    """Change a graph that returns gradients of inputs, and after them gradients of parameters.

    Args:
        graph: the graph; a result is in memory that no other one lies in.
        inputs: how many of its results are gradients of inputs.
    """
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
        with graph.inserting_after(last if gradient.op == "placeholder" else gradient):
            results[index] = graph.call_function(onto, (total, gradient))
        for node in (total, results[index]):
            node.meta.update(gradient.meta)
    output.args = (tuple(results),)
