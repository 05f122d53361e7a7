"""Drop what a graph computes in vain."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx


def drop_unread(graph: fx.Graph, kept: Collection[str] = ()) -> set[str]:
    """Drop nodes and placeholders that nothing reads, but for those ``kept``; returns the names of
    the dropped ones."""
    dropped = set[str]()
    for node in reversed(graph.nodes):
        if not node.users and node.op != "output" and node.name not in kept:
            graph.erase_node(node)
            dropped.add(node.name)
    return dropped
