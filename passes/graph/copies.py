"""Copy nodes from graph to graph. ``fx.Graph.node_copy`` looks for symbols in all operands, which
takes longer than all else that it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def node_copied(
    graph: fx.Graph,
    node: fx.Node,
    operand: Callable[[Any], Any],
    over: Callable[..., Any] = fx.map_arg,
) -> fx.Node:
    """A copy of a node at the end of a graph. Its name is the same if it is free there.

    Args:
        graph: the graph that gets the copy.
        node: the node.
        operand: what the copy reads in place of each operand that is a node.
        over: applies it to arguments; ``map_aggregate`` does so to all operands.
    """
    copy = graph.create_node(node.op, node.target, name=node.name)
    copy.args = over(node.args, operand)
    if node.kwargs:
        copy.kwargs = over(node.kwargs, operand)
    copy.meta.update(node.meta)
    return copy
