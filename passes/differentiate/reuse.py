"""Let an elementwise operation write over an operand that nothing reads after it.

before:  a = add(x, y);  b = relu(a);   return (b,)
after:   a = add(x, y);  b = relu_(a);  return (b,)

It saves memory, and the time to touch it anew. Only values that the graph itself made are written
over, never its arguments, and none that a result, a view or a later operation still needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fxpipe.passes.graph.aliasing import may_alias
from fxpipe.passes.partition.assignment import is_part


def reuse(graph: fx.Graph) -> int:
    """Rewrite a functional graph; its meaning stays. Returns how many operations were changed."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    # of the graph as it is: an operation that was changed looks like a view of its operand
    owner = {node: _owner(node) for node in graph.nodes}
    fresh = {node for node in graph.nodes if node.op == "call_function" and not _is_view(node)}
    death = _last_uses(graph, order, owner)
    changed = 0
    for node in graph.nodes:
        if not _is_elementwise(node):
            continue
        for operand in node.all_input_nodes:
            others = [owner[other] for other in node.all_input_nodes if other is not operand]
            dies = death.get(operand) == order[node] and operand not in others
            if (
                dies
                and operand in fresh
                and _lies_alike(operand, node)
                and _write_over(node, operand)
            ):
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
    """Let an operation put its result into an operand, if it has a variant that does.

    Variants that were generated from the functional one would only add a copy.
    """
    target: Any = node.target
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    if packet is not None and node.args and node.args[0] is operand:
        variant = getattr(packet, target._overloadname, None)
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


def _lies_alike(operand: fx.Node, node: fx.Node) -> bool:
    """Whether an operand lies in memory as the result will."""
    value, result = operand.meta.get("val"), node.meta.get("val")
    return (
        isinstance(value, Tensor)
        and isinstance(result, Tensor)
        and value.dtype == result.dtype
        and value.shape == result.shape
        and value.stride() == result.stride()
    )


def _is_view(node: fx.Node) -> bool:
    """Whether a node's value may lie in the memory of another's."""
    if is_part(node):
        return _is_view(node.all_input_nodes[0])
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return True
    return may_alias(node.target)


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory a value lies in, as far as views tell."""
    while node.op == "call_function" and _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _last_uses(
    graph: fx.Graph, order: dict[fx.Node, int], owner: dict[fx.Node, fx.Node]
) -> dict[fx.Node, int]:
    """Memory, as the node that made it → the place of the last node that reads it or a view."""
    death: dict[fx.Node, int] = {}
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            death[owner[operand]] = max(death.get(owner[operand], 0), order[node])
    return death
