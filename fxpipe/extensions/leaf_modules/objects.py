"""Nodes that make the ordered dicts and dataclasses which leaf modules are given.

before:  v = self.layer(Seen(last=a, hidden=b))
after:   seen = Seen(last=a, hidden=b);  v = self.layer(seen)
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields, is_dataclass
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree


def _object_of(value: Any, graph: fx.Graph) -> fx.Node | None:
    """Create a node that makes an ordered dict or a dataclass; None for all other values.

    torch.fx itself takes an ordered dict for a plain dict, and a dataclass that is also a dict, as
    the outputs of the transformers library are.
    """
    kind = type(value)
    if kind is OrderedDict or (is_dataclass(kind) and isinstance(value, dict)):
        items = dict(value)
    elif is_dataclass(kind):
        items = {field.name: getattr(value, field.name) for field in fields(kind)}
    else:
        return None
    args, kwargs = ((), items) if is_dataclass(kind) else ((items,), {})
    return graph.create_node("call_function", kind, args, kwargs)


def with_objects(value: Any, call: fx.Node) -> Any:
    """Replace the objects among a leaf module's arguments by nodes, right before its ``call``, that
    make them."""
    items, spec = pytree.tree_flatten(value, is_leaf=lambda inner: inner is not value)
    if len(items) == 1 and items[0] is value:
        return value
    container = pytree.tree_unflatten([with_objects(item, call) for item in items], spec)
    with call.graph.inserting_before(call):
        node = _object_of(container, call.graph)
    if node is None:
        return container
    node.meta.update(
        {key: call.meta[key] for key in ("nn_module_stack", "stack_trace") if key in call.meta}
    )
    return node
