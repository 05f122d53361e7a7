"""Split a joint graph into forward and backward, with explicit saved tensors between them.

before:  a = f(x, w);  g1 = df(g, a, w);  return (a, g1)
after:   forward:  a = f(x, w);  return (a, a, w)          the last two are saved
         backward: g1 = df(g, a, w);  return (g1,)         with saved and g as inputs
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import fx

from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.differentiate.extract import ancestors, crossing, extract, runnable
from fxpipe.passes.differentiate.joint import Joint
from fxpipe.passes.graph.aliasing import may_alias
from fxpipe.passes.partition.assignment import is_part

aten = torch.ops.aten


def split_joint(joint: Joint, index: int) -> GraphKernel:
    """The kernel of a traced stage, whose graph is changed; the index is for names of graphs."""
    graph = joint.graph
    _drop_detach(graph)
    graph.eliminate_dead_code()
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    count = len(joint.stage.parameters) + len(joint.stage.buffers) + joint.inputs
    arguments, gradients = placeholders[:count], placeholders[count:]
    for node, name in zip(placeholders, joint.names, strict=True):
        node.name = name
    returned: Sequence[Any] = next(n for n in graph.nodes if n.op == "output").args[0]
    kept = joint.outputs + joint.writes
    results, found = list(returned[:kept]), list(returned[kept:])
    early = ancestors(results)
    early.update(arguments)
    wanted = ancestors(found)
    late = [node for node in graph.nodes if node in wanted and node not in early]
    # one result of an operation with several is picked where the operation is
    early.update(node for node in late if is_part(node) and node.args[0] in early)
    late = [node for node in late if node not in early and node not in gradients]
    saved = crossing(late, found, early)
    inputs = _fresh_parameter_gradients(graph, joint, found, late, {*early, *gradients})
    computed = [node for node in graph.nodes if node in early and node not in arguments]
    forward = extract(arguments, computed, [*results, *saved])
    backward = extract([*saved, *gradients], late, found) if found else None
    return GraphKernel(
        runnable(forward, f"Stage{index}Forward"),
        # a copy runs: what is parted must be functional still
        None if backward is None else runnable(deepcopy(backward), f"Stage{index}Backward", inputs),
        functional_backward=backward,
        outputs=joint.outputs,
        writes=joint.writes,
        input_strides=joint.input_strides,
        gradient_outputs=joint.gradient_outputs,
        gradient_strides=joint.gradient_strides,
        input_gradients=inputs,
        parameter_gradients=joint.parameter_gradients,
    )


def _drop_detach(graph: fx.Graph) -> None:
    """Replace each ``detach`` by its input: the graph does not run under autograd."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _fresh_parameter_gradients(
    graph: fx.Graph,
    joint: Joint,
    found: list[Any],
    late: list[fx.Node],
    given: set[fx.Node],
) -> int:
    """Copy each parameter gradient that shares memory or is a part of a larger storage: the first
    one becomes the sum over micro-batches.

    Returns how many of the gradients found are those of inputs.
    """
    inputs = sum(gradient is not None for gradient in joint.input_gradients)
    lying = Counter(place for node in found for place in _memory(node))
    for index in range(inputs, len(found)):
        node = found[index]
        memory = _memory(node)
        if memory & given or not _whole(node) or any(lying[place] > 1 for place in memory):
            with graph.inserting_after(late[-1] if late else node):
                clone = graph.call_function(aten.clone.default, (node,))
            clone.meta.update(node.meta, val=node.meta["val"].clone())  # in memory of its own
            late.append(clone)
            lying.subtract(_memory(node))
            found[index] = clone
    return inputs


def _may_alias(node: fx.Node) -> bool:
    """Whether the value may share memory with another one."""
    if node.op != "call_function":
        return True
    if is_part(node):
        source = node.args[0]
        return not isinstance(source, fx.Node) or _may_alias(source)
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return may_alias(target)


def _whole(node: fx.Node) -> bool:
    """Whether a value is all of the memory that it lies in, in some order of dimensions."""
    value = node.meta.get("val")
    while isinstance(value, torch.Tensor) and node.op == "call_function" and _may_alias(node):
        if len(node.all_input_nodes) != 1:
            return False
        (node,) = node.all_input_nodes
        source = node.meta.get("val")
        if not isinstance(source, torch.Tensor) or source.numel() != value.numel():
            return False
    return isinstance(value, torch.Tensor)


def _memory(result: Any) -> set[fx.Node]:
    """The nodes whose memory a result may share, itself included."""
    found: set[fx.Node] = set()
    todo = [result] if isinstance(result, fx.Node) else []
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes if _may_alias(node) else []
    return found
