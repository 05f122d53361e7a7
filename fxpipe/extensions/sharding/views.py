"""Let backwards make views of weights anew, so that nothing that is saved keeps dropped weights.

before:  forward:  t = w.t();  y = x @ t;  return (y, t, x)
         backward: gx = g @ t.t();  …                          with t and x as inputs
after:   forward:  t = w.t();  y = x @ t;  return (y, w, x)
         backward: t = w.t();  gx = g @ t.t();  …              with w and x as inputs

A saved parameter is the parameter itself, whatever memory it has by then.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx
from torch._ops import OpOverload

from fxpipe.ir.plan import Plan, Stage
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.differentiate.extract import results, shares_memory


def remake_views(plan: Plan) -> Plan:
    """Plan → Plan: see above. Its kernels have whole backwards."""
    return replace(plan, stages=tuple(map(_remade, plan.stages)))


def _remade(stage: Stage) -> Stage:
    kernel = stage.kernel
    if not isinstance(kernel, GraphKernel) or kernel.backward_graph is None:
        return stage
    graph = kernel.forward_graph.graph
    arguments = graph.find_nodes(op="placeholder")[: len(stage.parameters)]
    first = kernel.outputs + kernel.writes
    returned = results(graph)
    views = {
        at - first: (source, made)
        for at, node in enumerate(returned)
        if at >= first and isinstance(node, fx.Node)
        for source, made in [_source(node)]
        if made and source in arguments
    }
    if not views:
        return stage
    for at, (source, _) in views.items():
        returned[first + at] = source
    graph.output_node().args = (tuple(returned),)
    graph.eliminate_dead_code()
    kernel.forward_graph.recompile()
    backwards = [kernel.backward_graph.graph]
    if kernel.functional_backward is not None:
        backwards.append(kernel.functional_backward)
    for backward in backwards:
        inputs = backward.find_nodes(op="placeholder")
        for at, (source, made) in views.items():
            _put(backward, inputs[at], source, made, inputs[-1])
    kernel.backward_graph.recompile()
    return stage


def _source(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The node that a value is a view of, through all views, and these in order."""
    made: list[fx.Node] = []
    while isinstance(node.target, OpOverload) and shares_memory(node):
        if len(node.all_input_nodes) != 1:
            break
        made.insert(0, node)
        (node,) = node.all_input_nodes
    return node, made


def _put(
    graph: fx.Graph, given: fx.Node, source: fx.Node, made: list[fx.Node], last: fx.Node
) -> None:
    """Let a graph make a view of what it is given."""
    users = [*given.users]
    copies = {source: given}
    with graph.inserting_after(last):
        for node in reversed(made):
            copies[node] = graph.create_node(node.op, node.target, node.args, node.kwargs)
    for node in made:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node].args, copies[node].kwargs = args, kwargs
        copies[node].meta.update(node.meta)
    for user in users:
        user.replace_input_with(given, copies[made[-1]])
    given.meta.update(source.meta)
