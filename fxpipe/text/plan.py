"""Print plans and traced graphs: graphs, with what they read and write.

A plan lists its edges, then its stages::

    plan stages=2
    edge in x host->0
    edge act relu 0->1
    edge out linear 1->host
    edge grad relu 1->0
    edge grad linear host->1
    stage 0
      parameter p_conv_weight = conv.weight
      buffer b_bn_running_mean = bn.running_mean
      write bn.running_mean = getitem_3
      graph
        p_conv_weight = placeholder()
        …
        return (relu, getitem_3)
    stage 1
      …

A traced graph lists the inputs and outputs of the whole model::

    traced
      input x
      input None                       # an input of the call that is no value of the graph
      output linear (0,)               # with its batch dimensions, or None if they are unknown
      output literal 3 ()
      loss mse_loss
      norm ('moments', 'bn.running_mean', 'bn.running_var', None, 0.1)
      parameter p_weight = linear.weight
      graph
        …

Names of the model are quoted if they contain anything but letters, digits, ``_`` and ``.``. The
text leaves out a plan's shapes, costs and kernels. Of a traced graph it leaves out how the outputs
nest, the values of constants, and the sizes for which the graph holds.

A graph has a line of Python for each node, its inputs first::

    x = placeholder()
    p_weight = placeholder()
    conv2d = torch.ops.aten.conv2d.default(x, p_weight, None, [1, 1], [1, 1])
    h = self.encoder[0].block(conv2d)                 # a module that is called
    w = self.encoder[0].weight                        # an attribute of the root
    y = h.view(2, 3)                                  # a method of a value
    return (y, w)

It leaves out metadata, type annotations, the name of the output node, and whether a sequence is one
of fx's immutable classes. The texts are for people and for comparisons; nothing reads them back.
"""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from fxpipe.formatting import without_addresses
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.traced import Traced, Value
from fxpipe.ir.value import Edge
from fxpipe.text.scan import is_name

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")


def print_plan(plan: Plan) -> str:
    """Print a plan as text."""
    edges = (*plan.edges, *plan.gradients)
    lines = [f"plan stages={len(plan.stages)}", *(f"edge {edge}" for edge in edges)]
    for stage in plan.stages:
        lines.append(f"stage {stage.index}")
        lines += [line for edge in plan.edges if (line := _skip(edge, stage.index))]
        lines.extend(_body(stage))
    return "\n".join(lines) + "\n"


def _skip(edge: Edge, stage: int) -> str:
    """What a stage does with a value that skips stages: it stashes or pops it; else ""."""
    if edge.kind == "skip" and edge.source == stage:
        return f"  stash {edge.value} -> {edge.target}"
    if edge.kind == "skip" and edge.target == stage:
        return f"  pop {edge.value} <- {edge.source}"
    return ""


def print_traced(traced: Traced) -> str:
    """Print a traced graph as text."""
    lines = ["traced"]
    lines += [f"  input {name}" for name in traced.inputs]
    for out in traced.outputs:
        what = out.name if isinstance(out, Value) else f"literal {print_value(out.value)}"
        lines.append(f"  output {what} {out.dims}")
    if traced.loss is not None:
        lines.append(f"  loss {traced.loss}")
    lines += [f"  logged {name!r} = {value}" for name, value in traced.logged.items()]
    for norm in traced.deferred:
        fields = (norm.moments, norm.running_mean, norm.running_var, norm.tracked, norm.momentum)
        lines.append(f"  norm {print_value(fields)}")
    return "\n".join([*lines, *_body(traced)]) + "\n"


def _body(holder: Stage | Traced) -> Iterator[str]:
    """Print what a graph reads and writes, and the graph, as indented lines."""
    for word, arguments in (("parameter", holder.parameters), ("buffer", holder.buffers)):
        for argument in arguments:
            yield f"  {word} {argument.name} = {_print_target(argument.target)}"
    for write in holder.writes:
        yield f"  write {_print_target(write.target)} = {write.value}"
    yield "  graph"
    for line in holder.text.split("\n"):
        yield f"    {line}"


def _print_target(target: str) -> str:
    return target if _PLAIN.fullmatch(target) else repr(target)


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
