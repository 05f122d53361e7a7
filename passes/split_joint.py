"""Part a joint graph into forward and backward, with what is kept between them explicit.

before:  a = f(x, w);  g1 = df(g, a, w);  return (a, g1)
after:   forward:  a = f(x, w);  return (a, a, w)          the last two are saved
         backward: g1 = df(g, a, w);  return (g1,)         with saved and g as inputs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.kernel import GraphKernel
from fxpipe.passes.joint import Joint
from fxpipe.passes.partition import is_part
from fxpipe.passes.reuse import may_alias, reuse

aten = torch.ops.aten


def split_joint(joint: Joint, index: int) -> GraphKernel:
    """The kernel of a traced stage.

    Args:
        joint: the traced stage; its graph is changed.
        index: the stage's number, for the names of the graphs.
    """
    graph = joint.module.graph
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
    early = _ancestors(results)
    early.update(arguments)
    late = [node for node in graph.nodes if node in _ancestors(found) and node not in early]
    # one result of an operation with several is picked where the operation is
    early.update(node for node in late if is_part(node) and node.args[0] in early)
    late = [node for node in late if node not in early and node not in gradients]
    saved = _boundary(late, found, early)
    inputs = _fresh_parameter_gradients(graph, joint, found, late, {*early, *gradients})
    forward = _module(
        graph,
        arguments,
        [node for node in graph.nodes if node in early and node not in arguments],
        [*results, *saved],
        f"Stage{index}Forward",
    )
    backward = None
    if found:
        backward = _module(graph, [*saved, *gradients], late, found, f"Stage{index}Backward")
    return GraphKernel(
        forward,
        backward,
        outputs=joint.outputs,
        writes=joint.writes,
        input_strides=joint.input_strides,
        gradient_outputs=joint.gradient_outputs,
        gradient_strides=joint.gradient_strides,
        input_gradients=inputs,
        parameters=joint.parameter_gradients,
    )


def _drop_detach(graph: fx.Graph) -> None:
    """Without autograd around it a detach is its input."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _ancestors(nodes: Sequence[Any]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    todo = [node for node in nodes if isinstance(node, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return seen


def _boundary(late: Sequence[fx.Node], found: Sequence[Any], early: set[fx.Node]) -> list[fx.Node]:
    """What the forward has and the backward reads, each once."""
    read = [source for node in late for source in node.all_input_nodes]
    read += [node for node in found if isinstance(node, fx.Node)]
    return list(dict.fromkeys(node for node in read if node in early))


def _fresh_parameter_gradients(
    graph: fx.Graph,
    joint: Joint,
    found: list[Any],
    late: list[fx.Node],
    given: set[fx.Node],
) -> int:
    """Let no parameter gradient be a view or be shared, for the caller adds into it.

    Returns how many of the gradients found are those of inputs.
    """
    inputs = sum(gradient is not None for gradient in joint.input_gradients)
    for index in range(inputs, len(found)):
        node = found[index]
        others = [other for place, other in enumerate(found) if place != index]
        if node in given or _may_alias(node) or any(_same_storage(node, o) for o in others):
            with graph.inserting_after(late[-1] if late else node):
                clone = graph.call_function(aten.clone.default, (node,))
            clone.meta.update(node.meta)
            late.append(clone)
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


def _same_storage(node: fx.Node, other: Any) -> bool:
    return bool(node is other) or (
        isinstance(other, fx.Node) and _may_alias(other) and node in _ancestors([other])
    )


def _module(
    graph: fx.Graph,
    inputs: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    results: Sequence[Any],
    name: str,
) -> fx.GraphModule:
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = new.placeholder(node.name)
        copies[node].target = copies[node].name  # the argument's name, made unique as the node's
        copies[node].meta.update(node.meta)
    for node in nodes:
        copies[node] = new.node_copy(node, lambda n: copies[n])
    new.output(tuple(copies[r] if isinstance(r, fx.Node) else r for r in results))
    new.set_codegen(_Boxed())
    reuse(new)
    module = fx.GraphModule(torch.nn.Module(), new, name)
    return module


class _Boxed(fx.graph.CodeGen):
    """Generated code that takes its arguments in a list and empties it, so that each is freed
    at its last use."""

    def gen_fn_def(self, free_vars: list[str], *args: Any, **kwargs: Any) -> str:
        names = [variable.split(":")[0].split("=")[0].strip() for variable in free_vars]
        names = [name for name in names if name != "self"]
        lines = [f"def {self._func_name}(self, arguments):"]
        if names:
            lines.append(f"    {', '.join(names)}, = arguments")
        lines.append("    arguments.clear()")
        return "\n".join(lines)
