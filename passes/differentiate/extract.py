"""Extract nodes of a functional graph into a graph of their own, and make it ready to run.

before:  a = f(x, w);  g1 = df(g, a, w);  return (a, g1)
after:   g1 = df(g, a, w);  return (g1,)          for the inputs a, w, g, the node g1, the result g1

``reuse`` lets an elementwise operation write over an operand that nothing reads after it.

before:  a = add(x, y);  b = relu(a);   return (b,)
after:   a = add(x, y);  b = relu_(a);  return (b,)

That saves memory, and the time of first touching new memory. Only values that the graph computes
are written over, never its arguments, and none that a result, a view or a later operation needs.
What is written keeps its strides, while a new result gets strides of its own: a tensor of shape
(N, C, 1, 1) may have those of either memory format, which later kernels look at. So such a tensor
is written over only where PyTorch does the same.

``accumulate`` adds every gradient of a parameter to its sum over micro-batches at once.

before:  a = mm(g, x);  b = sum(g);  c = mm(g, w);  return (c, a, b)
after:   a = mm(g, x);  t = onto(total_a, a);  b = sum(g);  u = onto(total_b, b);  c = mm(g, w);
         return (c, t, u)                      total_a and total_b are inputs, None at first

A gradient is then added while it is in the cache, and freed at once: the gradients never exist all
together beside their sums. The sums are the same to the bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fxpipe.ir.called import Called
from fxpipe.kernels.graph import onto
from fxpipe.passes.graph.aliasing import fits_both_formats, may_alias, same_layout
from fxpipe.passes.graph.copies import node_copied
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.passes.partition.assignment import is_part

STRIDES_OF_SUM = "fxpipe.strides_of_sum"
"""Key of the metadata of a parameter's gradient: see ``kernels.graph.strides_of_sum``."""


def results(graph: fx.Graph) -> list[Any]:
    """The values that a graph returns."""
    returned: Any = graph.output_node().args[0]
    return list(returned)


def ancestors(
    nodes: Iterable[Any], follow: Callable[[fx.Node], bool] = lambda _: True
) -> set[fx.Node]:
    """The given nodes and all nodes that they depend on, through nodes that ``follow`` accepts.

    Values that are no nodes are ignored.
    """
    seen: set[fx.Node] = set()
    todo = [node for node in nodes if isinstance(node, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes if follow(node) else ())
    return seen


def crossing(late: Iterable[fx.Node], results: Iterable[Any], early: set[fx.Node]) -> list[fx.Node]:
    """The early nodes that late nodes or results read, each once."""
    read = [source for node in late for source in node.all_input_nodes]
    read += [node for node in results if isinstance(node, fx.Node)]
    return list(dict.fromkeys(node for node in read if node in early))


def extract(
    inputs: Sequence[fx.Node], nodes: Iterable[fx.Node], results: Sequence[Any]
) -> fx.Graph:
    """A new graph that computes ``nodes`` of another graph, in this order.

    The ``inputs`` become its placeholders. It returns the results as one tuple; values that are no
    nodes are returned as they are.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].target = copies[node].name  # which fx has made unique
        copies[node].meta.update(node.meta)
    for node in nodes:
        copies[node] = node_copied(graph, node, copies.__getitem__)
    graph.output(tuple(copies[r] if isinstance(r, fx.Node) else r for r in results))
    return graph


def with_names(graph: fx.Graph, inputs: Sequence[fx.Node]) -> fx.Graph:
    """Call the placeholders of a graph as the ``inputs`` that it was extracted for; fx renames one
    that is called like a builtin."""
    for copy, node in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        copy.name = copy.target = node.name
    return graph


def runnable(
    graph: fx.Graph, name: str, inputs: int | None = None, *, backward: bool = True
) -> fx.GraphModule:
    """A module that takes the graph's inputs in one list, and empties that list.

    The graph must be functional; it is changed and becomes the module's. For a backward, ``inputs``
    is how many gradients of inputs it returns first; the gradients of parameters after them are
    added to sums.
    """
    graph.set_codegen(_Boxed())
    _transpose_once(graph)
    reuse(graph, backward)
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


def accumulate(graph: fx.Graph, inputs: int) -> None:
    """Let a graph add the gradients of parameters, which it returns after those of so many
    ``inputs``, to sums. Each of its results must have memory of its own."""
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    gradients = results[inputs:]
    *_, last = graph.find_nodes(op="placeholder")
    totals = []
    for gradient in gradients:
        with graph.inserting_after(last):
            last = graph.placeholder(f"total_{gradient.name}")
        last.target = last.name
        totals.append(last)
    for index, (total, gradient) in enumerate(zip(totals, gradients, strict=True), inputs):
        meta: dict[str, Any] = gradient.meta
        args: tuple[Any, ...] = total, gradient
        if (strides := meta.get(STRIDES_OF_SUM)) is not None:
            value, args = meta["val"], (*args, strides)
            meta = {**meta, "val": value.new_empty_strided(value.shape, strides)}
        with graph.inserting_after(last if gradient.op == "placeholder" else gradient):
            results[index] = graph.call_function(onto, args)
        for node in (total, results[index]):
            node.meta.update(meta)
    output.args = (tuple(results),)


_ROUNDS_ALIKE = {torch.ops.aten.mul.Scalar: "Tensor"}
"""Operation → the overload of its in-place variant that rounds alike: ``mul_.Scalar`` first rounds
its number to the tensor's dtype, which differs in half precision."""

_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")


class _Boxed(fx.graph.CodeGen):
    """Generates code that takes its arguments in a list and empties it, so that each is freed at
    its last use. The code calls the C++ functions of operators directly, which saves a fifth of the
    time of a short operation."""

    def _gen_python_code(self, *args: Any, **kwargs: Any) -> fx.graph.PythonCode:
        code = super()._gen_python_code(*args, **kwargs)

        def bind(match: re.Match[str]) -> str:
            operator: Any = torch.ops
            for part in match.groups():
                operator = getattr(operator, part)
            if type(operator) is not OpOverload or not hasattr(operator, "_op"):
                return match[0]
            name = "_".join(("", *match.groups()))
            code.globals[name] = operator._op
            return name

        code.src = _OPERATOR.sub(bind, code.src)
        return code

    def gen_fn_def(self, free_vars: list[str], *args: Any, **kwargs: Any) -> str:
        names = [variable.split(":")[0].split("=")[0].strip() for variable in free_vars]
        names = [name for name in names if name != "self"]
        lines = [f"def {self._func_name}(self, arguments):"]
        if names:
            lines.append(f"    {', '.join(names)}, = arguments")
        lines.append("    arguments.clear()")
        return "\n".join(lines)


def reuse(graph: fx.Graph, backward: bool = False) -> int:
    """Let operations write over operands where that changes no result; return how many do."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    # found before any change, after which an operation looks like a view of its operand
    owner = {node: _owner(node) for node in graph.nodes}
    fresh = {node for node in graph.nodes if node.op == "call_function" and not shares_memory(node)}
    death = _last_uses(graph, order, owner)
    changed = 0
    for node in graph.nodes:
        if not _is_elementwise(node):
            continue
        for operand in node.all_input_nodes:
            others = [owner[other] for other in node.all_input_nodes if other is not operand]
            dies = death.get(operand) == order[node] and operand not in others
            if dies and operand in fresh and same_layout(operand, node):
                # as autograd adds up gradients of a value in the memory of the first
                adds = backward and node.target is torch.ops.aten.add.Tensor
                if fits_both_formats(node) and not (adds and node.args[0] is operand):
                    continue
                if _write_over(node, operand):
                    changed += 1
                    break
    graph.lint()
    return changed


def _is_elementwise(node: fx.Node) -> bool:
    target: Any = node.target
    return (
        node.op == "call_function"
        and isinstance(target, OpOverload)
        and torch.Tag.pointwise in target.tags
        and len(target._schema.returns) == 1
    )


def _write_over(node: fx.Node, operand: fx.Node) -> bool:
    """Let an operation write its result over an operand, if a variant of it does; return whether.

    Variants that PyTorch generates from the functional one are left out: they only add a copy.
    """
    target: Any = node.target
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    if packet is not None and node.args and node.args[0] is operand:
        variant = getattr(packet, _ROUNDS_ALIKE.get(target, target._overloadname), None)
        if variant is not None and torch.Tag.generated not in variant.tags:
            node.target = variant
            return True
    wanted = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    for overload in target.overloadpacket.overloads():
        variant = getattr(target.overloadpacket, overload)
        taken = [(a.name, str(a.type)) for a in variant._schema.arguments if not a.is_out]
        outs = [a.name for a in variant._schema.arguments if a.is_out]
        if taken == wanted and len(outs) == 1 and torch.Tag.generated not in variant.tags:
            node.target = variant
            node.kwargs = {**node.kwargs, outs[0]: operand}
            return True
    return False


def shares_memory(node: fx.Node) -> bool:
    """Whether a node's value may share the memory of another value."""
    if is_part(node):
        return shares_memory(node.all_input_nodes[0])
    target = getattr(node.target, "__wrapped__", node.target)
    if isinstance(target, Called):
        return not target.fresh
    return not isinstance(target, OpOverload) or may_alias(target)


def _owner(node: fx.Node) -> fx.Node:
    """The node that a value is a view of, through all views; the node itself if it is none."""
    while node.op == "call_function" and shares_memory(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _last_uses(
    graph: fx.Graph, order: dict[fx.Node, int], owner: dict[fx.Node, fx.Node]
) -> dict[fx.Node, int]:
    """Owner of memory → the place of the last node that reads it or a view of it."""
    death: dict[fx.Node, int] = {}
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            death[owner[operand]] = max(death.get(owner[operand], 0), order[node])
    return death
