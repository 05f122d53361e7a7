"""Split a joint graph into a forward and a backward, with saved tensors between them.

before:  a = f(x, w);  g1 = df(g, a, w);  return (a, g1)
after:   forward:  a = f(x, w);  return (a, a, w)          the last two are saved
         backward: g1 = df(g, a, w);  return (g1,)         with saved and g as inputs
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.kernels.graph import strides_of_sum
from fxpipe.passes.differentiate.extract import (
    STRIDES_OF_SUM,
    ancestors,
    crossing,
    extract,
    results,
    runnable,
    shares_memory,
)
from fxpipe.passes.partition.assignment import is_part

aten = torch.ops.aten

_POOLS = {
    aten.max_pool2d_with_indices.default: (aten.max_pool2d_with_indices_backward.default, 2),
    aten.max_pool3d_with_indices.default: (aten.max_pool3d_with_indices_backward.default, 3),
}
"""Max pooling → its backward, which reads the places of the maxima, and the dimensions of a plane,
within which places are counted."""

_INTEGERS = torch.int8, torch.int16, torch.int32, torch.int64


def split_joint(
    graph: fx.Graph,
    index: int,
    names: Sequence[str],
    arguments: int,
    kept: int,
    trained: Sequence[Tensor],
    functional: bool,
) -> tuple[fx.GraphModule, fx.GraphModule | None, fx.Graph | None]:
    """Return the first three fields of a GraphKernel.

    Args:
        graph: the joint graph; it is changed.
        index: the number of the stage, for the names of the graphs.
        names: the names of the graph's placeholders.
        arguments: how many placeholders the forward takes; the others are gradients.
        kept: how many of the graph's results the forward returns.
        trained: the parameters whose gradients are the last results, after those of inputs.
        functional: whether the functional backward is wanted; else the third field is None.
    """
    _drop_unread(graph)
    placeholders = graph.find_nodes(op="placeholder")
    for node, name in zip(placeholders, names, strict=True):
        node.name = name
    given, gradients = placeholders[:arguments], placeholders[arguments:]
    returned = results(graph)
    outputs, computed = returned[:kept], returned[kept:]
    inputs = len(computed) - len(trained)
    early = ancestors(outputs)
    early.update(given)
    # a part of an operation's result is taken in the graph of the operation
    early.update(node for node in graph.nodes if is_part(node) and node.args[0] in early)
    early.update(_narrow_places(graph, early))
    needed = ancestors(computed) - early
    late = [node for node in graph.nodes if node in needed and node not in gradients]
    saved = crossing(late, computed, early)
    _copy_shared_gradients(graph, inputs, computed, late, {*early, *gradients})
    for node, parameter in zip(computed[inputs:], trained, strict=True):
        node.meta[STRIDES_OF_SUM] = strides_of_sum(node.meta["val"], parameter)
    nodes = [node for node in graph.nodes if node in early and node.op != "placeholder"]
    graph = extract(given, nodes, [*outputs, *saved])
    forward = runnable(graph, f"Stage{index}Forward", backward=False)
    if not computed:
        return forward, None, None
    backward = extract([*saved, *gradients], late, computed)
    # a copy runs, where passes that split the backward need it functional
    runs = deepcopy(backward) if functional else backward
    module = runnable(runs, f"Stage{index}Backward", inputs)
    return forward, module, backward if functional else None


def _drop_unread(graph: fx.Graph) -> None:
    """Drop what nothing reads. ``fx`` would ask of each node whether it is pure, and all are."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _narrow_places(graph: fx.Graph, early: set[fx.Node]) -> list[fx.Node]:
    """Let the places of maxima be saved in as few bytes as they need, if nothing reads them but the
    backward of their pooling: as int64 they are 5 % of what a U-Net saves. Returns the new nodes
    that belong to the forward."""
    made = []
    for node in [node for node in graph.nodes if node in early and is_part(node)]:
        pool: Any = node.args[0]
        readers = list(node.users)
        if pool.target not in _POOLS or node.args[1] != 1:
            continue
        backward, dims = _POOLS[pool.target]
        if any(reader.target is not backward for reader in readers):
            continue
        plane = pool.args[0].meta["val"].shape[-dims:]
        dtype = next(each for each in _INTEGERS if prod(plane) - 1 <= torch.iinfo(each).max)
        value = node.meta["val"]
        with graph.inserting_after(node):
            narrow = graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
        narrow.meta.update(node.meta, val=value.to(dtype))
        made.append(narrow)
        for reader in readers:
            with graph.inserting_before(reader):
                wide = graph.call_function(aten._to_copy.default, (narrow,), {"dtype": value.dtype})
            wide.meta.update(reader.meta, val=value)
            reader.replace_input_with(node, wide)
    return made


def _copy_shared_gradients(
    graph: fx.Graph, inputs: int, gradients: list[Any], late: list[fx.Node], given: set[fx.Node]
) -> None:
    """Copy each parameter gradient that shares memory or is a part of a larger storage: that of the
    first micro-batch becomes the sum. Of the ``gradients``, so many of ``inputs`` come first."""
    sharing = Counter(owner for node in gradients for owner in _memory(node))
    for index in range(inputs, len(gradients)):
        node = gradients[index]
        memory = _memory(node)
        if memory & given or not _whole(node) or any(sharing[owner] > 1 for owner in memory):
            with graph.inserting_after(late[-1] if late else node):
                clone = graph.call_function(aten.clone.default, (node,))
            clone.meta.update(node.meta, val=node.meta["val"].clone())  # in memory of its own
            late.append(clone)
            sharing.subtract(memory)
            gradients[index] = clone


def _whole(node: fx.Node) -> bool:
    """Whether a value fills the storage that it lies in, in some order of dimensions."""
    value = node.meta.get("val")
    while isinstance(value, torch.Tensor) and node.op == "call_function" and shares_memory(node):
        if len(node.all_input_nodes) != 1:
            return False
        (node,) = node.all_input_nodes
        source = node.meta.get("val")
        if not isinstance(source, torch.Tensor) or source.numel() != value.numel():
            return False
    return isinstance(value, torch.Tensor)


def _memory(result: Any) -> set[fx.Node]:
    """The nodes whose memory a result may share, itself included."""
    return ancestors([result], follow=shares_memory)
