"""Print an fx graph as text, one node per line, each as a line of Python::

    x = placeholder()                                 # the graph's inputs come first
    p_weight = placeholder()
    conv2d = torch.ops.aten.conv2d.default(x, p_weight, None, [1, 1], [1, 1])
    h = self.encoder[0].block(conv2d)                 # a module that is called
    w = self.encoder[0].weight                        # an attribute of the root
    y = h.view(2, 3)                                  # a method of a value
    return (y, w)

The text is for people and for comparisons: what it leaves out does not change the graph's result.
That is metadata, type annotations, the name of the output node, and whether a sequence is one of
fx's immutable classes. Nothing reads it back.
"""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from fxpipe.formatting import without_addresses
from fxpipe.text.scan import is_name

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


def print_graph(graph: fx.Graph) -> str:
    """Print a graph as text, without a final line break."""
    order = sorted(graph.nodes, key=lambda node: node.op != "placeholder")
    return "\n".join(map(_print_node, order))


def print_function(function: Callable[..., Any]) -> str:
    """Print the name by which code calls a function."""
    match function:
        case OpOverload() | OpOverloadPacket():
            namespace, _, name = str(function).partition(".")
            return _print_path(f"torch.ops.{namespace}", name)
        case HigherOrderOperator():
            return f"torch.ops.higher_order.{function}"
    name = getattr(function, "__name__", None) or without_addresses(repr(function))
    if getattr(builtins, name, None) is function:
        return name
    for holder in (torch, torch.nn.functional):  # torch's own have no module, or a private one
        if getattr(holder, name, None) is function:
            return f"{holder.__name__}.{name}"
    module = (getattr(function, "__module__", None) or "?").lstrip("_")
    whole = getattr(function, "__qualname__", name)
    return f"{module}.{name if '<locals>' in whole else whole}"


def print_value(value: Any) -> str:
    """Print an argument of a node as an expression."""
    match value:
        case fx.Node():
            return value.name
        case float() if not math.isfinite(value):
            return f"-math.{-value}" if value < 0 else f"math.{value}"
        case tuple():
            items = [print_value(item) for item in value]
            return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
        case list():
            return f"[{', '.join(map(print_value, value))}]"
        case dict():
            pairs = (f"{print_value(key)}: {print_value(item)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        case slice():
            ends = (print_value(end) for end in (value.start, value.stop, value.step))
            return f"slice({', '.join(ends)})"
        case torch.device():
            return f"torch.device({str(value)!r})"
        case OpOverload() | OpOverloadPacket():
            return print_function(value)
    return "..." if value is Ellipsis else without_addresses(repr(value))


def _print_node(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {print_value(node.args[0])}"
    return f"{node.name} = {_print_expression(node)}"


def _print_expression(node: fx.Node) -> str:
    args, target = [print_value(arg) for arg in node.args], node.target
    if node.op == "placeholder":
        named = [] if target == node.name else [repr(target)]
        return f"placeholder({', '.join(named + [f'default={arg}' for arg in args])})"
    if node.op == "get_attr":
        return _print_path("self", str(target))
    if node.op == "call_module":
        function = _print_path("self", str(target))
    elif node.op == "call_method":
        function, args = f"{args[0]}.{target}", args[1:]
    else:
        assert not isinstance(target, str)
        function = print_function(target)
    named = [f"{name}={print_value(value)}" for name, value in node.kwargs.items()]
    return f"{function}({', '.join(args + named)})"


def _print_path(start: str, target: str) -> str:
    """Print ``start`` and the dotted ``target`` as a Python expression."""
    whole = start
    for step in target.split("."):
        whole += (
            f".{step}" if is_name(step) else f"[{step if _INDEX.fullmatch(step) else repr(step)}]"
        )
    return whole
