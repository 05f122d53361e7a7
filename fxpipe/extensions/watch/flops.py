"""The floating-point operations of a graph, as PyTorch's own counter counts them."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry


def flops_of(graph: fx.Graph) -> int:
    """The operations of a forward: of products, convolutions and attention alone, two for each
    multiplication with its addition."""
    return sum(_of_node(node) for node in graph.nodes if isinstance(node.target, OpOverload))


def _of_node(node: fx.Node) -> int:
    target: Any = node.target
    count = flop_registry.get(target.overloadpacket)
    if count is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    found: int = count(*args, **kwargs, out_val=node.meta["val"])
    return found
