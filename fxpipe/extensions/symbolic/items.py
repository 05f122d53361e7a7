"""Take apart the containers in graphs of torch.fx, so that nodes read their items.

before:  t = self.split(x);  u = t[1:];  v = self.layer(u[0]);  return {"out": v, "rest": u}
after:   t = self.split(x);  a = t[1];  b = t[2];  v = self.layer(a);  return (v, a, b)

An edge between stages carries one tensor, or one item of what a node returns, and never a slice.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpipe.extensions.leaf_modules.nests import indices
from fxpipe.extensions.leaf_modules.objects import WHERE, makes_object
from fxpipe.ir.traced import Literal, Value
from fxpipe.torchtools.pytrees import Parts


def make_objects_at_readers(graph: fx.Graph) -> None:
    """Let each reader of an object make its own copy, in its own stage.

    The graph's output is left to ``take_outputs_apart``.
    """
    for node in reversed(list(graph.nodes)):  # an object comes after the objects that it holds
        for user in [user for user in node.users if makes_object(node) and user.op != "output"]:
            with graph.inserting_before(user):
                _give([user], node, graph.node_copy(node))


def take_slices_apart(graph: fx.Graph) -> None:
    """Let the readers of a slice of a node's result read the items of the result instead.

    The nodes must have their values, noted by ``Example``.
    """
    gettings = graph.find_nodes(op="call_function", target=operator.getitem)
    for node in gettings:
        whole, index = node.args
        if not isinstance(index, slice) or not _holds_several(whole):
            continue
        read = (_items(whole, node) if isinstance(whole, fx.Node) else whole)[index]
        for user in list(node.users):
            if user.target is operator.getitem and isinstance(user.args[1], int):
                user.replace_all_uses_with(read[user.args[1]])
        # a method of the slice, such as shape[1:].numel(), keeps it
        readers = [u for u in node.users if u.op != "call_method" or u.args[0] is not node]
        _give(readers, node, read if isinstance(node.meta["val"], list) else tuple(read))
    for node in gettings:
        whole, index = node.args
        if isinstance(whole, fx.Node) and isinstance(index, int | str) and _holds_several(whole):
            whole.append(node)


def _holds_several(whole: Any) -> bool:
    value = whole.meta["val"] if isinstance(whole, fx.Node) else whole
    return isinstance(value, tuple | list | dict)


def _items(whole: fx.Node, node: fx.Node) -> list[fx.Node]:
    """Create nodes for all items of ``whole``, right behind it, to replace its slice ``node``."""
    items = []
    for index, item in enumerate(whole.meta["val"]):
        with whole.graph.inserting_after(whole):
            items.append(whole.graph.call_function(operator.getitem, (whole, index)))
        value = item.to("meta") if isinstance(item, Tensor) else item
        items[-1].meta.update({**node.meta, "val": value})
    return items


def _give(readers: Iterable[fx.Node], node: fx.Node, value: Any) -> None:
    """Let the readers of a node read a value instead."""
    for reader in readers:
        reader.args = fx.node.map_arg(reader.args, lambda x: value if x is node else x)
        reader.kwargs = fx.node.map_arg(reader.kwargs, lambda x: value if x is node else x)


def take_outputs_apart(
    graph: fx.Graph,
) -> tuple[tuple[Value | Literal, ...], pytree.TreeSpec]:
    """Let a graph return its values as one flat tuple; return their descriptions and the spec."""
    end = graph.output_node()
    leaves, spec = pytree.tree_flatten(_plain(end.args[0]))
    values = tuple(
        Value(leaf.name) if isinstance(leaf, fx.Node) else Literal(leaf) for leaf in leaves
    )
    end.args = (tuple(leaf for leaf in leaves if isinstance(leaf, fx.Node)),)
    return values, spec


def _plain(value: Any) -> Any:
    """Replace fx's own containers by plain ones, and nodes that make objects by their parts."""
    if isinstance(value, fx.Node):
        parts = _object_of_nodes(value, value.target) if isinstance(value.target, type) else value
        return _parts(value) if parts is value else parts
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_plain(item) for item in value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _parts(node: fx.Node) -> Any:
    """The node, or, if its value is a container, such a container of nodes for its items."""
    value = node.meta["val"]
    leaves, spec = pytree.tree_flatten_with_path(value)
    parts: list[Any] = []
    for path, leaf in leaves:
        part = node
        for index in indices(node.name, value, path):
            with node.graph.inserting_after(part):
                part = node.graph.call_function(operator.getitem, (part, index))
            part.meta = {name: node.meta[name] for name in WHERE if name in node.meta}
        part.meta["val"] = leaf.to("meta") if isinstance(leaf, Tensor) else leaf
        parts.append(None if leaf is None else part)
    return pytree.tree_unflatten(parts, spec)


def _object_of_nodes(node: fx.Node, kind: type) -> Any:
    """The named tuple or dataclass that a node makes, but of nodes; see ``taken_apart``."""
    args, kwargs = _plain(node.args), _plain(node.kwargs)
    if hasattr(kind, "_fields") or kind in pytree.SUPPORTED_NODES:
        return kind(*args, **kwargs)
    if not is_dataclass(kind):
        return node
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in kwargs.items():
        holds = any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(value))
        (tensors if holds else others)[name] = value
    return Parts(kind, tensors, others)
