"""Take nodes of a functional graph out into a graph of their own, and make it ready to run.

before:  a = f(x, w);  g1 = df(g, a, w);  return (a, g1)
after:   g1 = df(g, a, w);  return (g1,)          of the inputs a, w, g, the node g1, the result g1
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.passes.differentiate.accumulate import accumulate
from fxpipe.passes.differentiate.reuse import reuse
from fxpipe.passes.graph.lazy_module import lazy_module


def ancestors(nodes: Iterable[Any]) -> set[fx.Node]:
    """Some nodes and all nodes that they depend on; values that are no nodes are ignored."""
    seen: set[fx.Node] = set()
    todo = [node for node in nodes if isinstance(node, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return seen


def crossing(late: Iterable[fx.Node], results: Iterable[Any], early: set[fx.Node]) -> list[fx.Node]:
    """The early nodes that late nodes or results read, each once."""
    read = [source for node in late for source in node.all_input_nodes]
    read += [node for node in results if isinstance(node, fx.Node)]
    return list(dict.fromkeys(node for node in read if node in early))


def extract(
    inputs: Sequence[fx.Node], nodes: Iterable[fx.Node], results: Sequence[Any]
) -> fx.Graph:
    """A new graph that computes some nodes of another one.

    Args:
        inputs: the nodes that become its placeholders.
        nodes: the nodes that it computes, in order.
        results: what it returns, as one tuple; values that are no nodes are returned as they are.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].target = copies[node].name  # the argument's name, made unique as the node's
        copies[node].meta.update(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[r] if isinstance(r, fx.Node) else r for r in results))
    return graph


def runnable(graph: fx.Graph, name: str, inputs: int | None = None) -> fx.GraphModule:
    """A module that takes the graph's inputs in one list, and empties that list.

    Args:
        graph: a functional graph; it is changed, and the module takes it over.
        name: the name of the module's class.
        inputs: for a backward, how many gradients of inputs it returns first; the gradients of
            parameters after them are added to sums. None for a graph without such.
    """
    graph.set_codegen(_Boxed())
    _transpose_once(graph)
    reuse(graph)
    if inputs is not None:
        accumulate(graph, inputs)
    return lazy_module(torch.nn.Module(), graph, name)


def _transpose_once(graph: fx.Graph) -> None:
    """Remove pairs of transposes that cancel, as in the weight gradients of linear layers."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.t.default):
        source: Any = node.args[0]
        if source.target is torch.ops.aten.t.default:
            node.replace_all_uses_with(source.args[0])
            graph.erase_node(node)
            if not source.users:
                graph.erase_node(source)


_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")


class _Boxed(fx.graph.CodeGen):
    """Generated code that takes its arguments in a list and empties it, so that each is freed
    at its last use. It calls what operators call, which saves a fifth of a short operation."""

    def _gen_python_code(self, *args: Any, **kwargs: Any) -> fx.graph.PythonCode:
        made = super()._gen_python_code(*args, **kwargs)

        def bound(match: re.Match[str]) -> str:
            called: Any = torch.ops
            for name in match.groups():
                called = getattr(called, name)
            if type(called) is not torch._ops.OpOverload or not hasattr(called, "_op"):
                return match[0]
            made.globals["_".join(("", *match.groups()))] = called._op
            return "_".join(("", *match.groups()))

        made.src = _OPERATOR.sub(bound, made.src)
        return made

    def gen_fn_def(self, free_vars: list[str], *args: Any, **kwargs: Any) -> str:
        names = [variable.split(":")[0].split("=")[0].strip() for variable in free_vars]
        names = [name for name in names if name != "self"]
        lines = [f"def {self._func_name}(self, arguments):"]
        if names:
            lines.append(f"    {', '.join(names)}, = arguments")
        lines.append("    arguments.clear()")
        return "\n".join(lines)
