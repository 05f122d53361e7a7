"""Graph modules whose code is written when somebody calls them; most are only read."""

from __future__ import annotations

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def lazy_module(root: nn.Module, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """A module of a graph, as ``fx.GraphModule`` makes it, without code so far.

    Args:
        root: has what the graph reads by name.
        graph: the graph; it is the module's from now on.
        name: the module's class.
    """
    return _LazyGraphModule(root, graph, name)
