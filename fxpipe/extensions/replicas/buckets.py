"""Split the last backward of every stage into buckets of gradients, which replicas can sum early.

before:  backward:  t = tanh_backward(g, y);  b = mm(t, z);  u = mm(w, t);  a = mm(u, x)
                    return (a, b)
after:   bucket 0:  t = tanh_backward(g, y);  b = mm(t, z);  return (x, w, t, b)
         bucket 1:  u = mm(w, t);  a = mm(u, x);  return (a,)

While the second graph runs, the replicas add up the first one's gradient, as with the buckets of
``DistributedDataParallel``. Micro-batches before the last one run the graph as a whole. The
operations are the same, and so are the gradients, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpipe.ir.plan import Plan, Stage
from fxpipe.kernels.graph import BucketGraph, GraphKernel
from fxpipe.passes.differentiate.extract import (
    ancestors,
    crossing,
    extract,
    results,
    runnable,
    shares_memory,
)
from fxpipe.passes.partition.assignment import is_part
from fxpipe.torchtools.pytrees import size_in_bytes


def into_buckets(plan: Plan, bucket_bytes: float) -> Plan:
    """Plan → Plan: divide every stage's gradients into buckets.

    Args:
        plan: a differentiated plan; backwards in halves are split, too.
        bucket_bytes: a bucket is complete once it has so many bytes.
    """
    return replace(plan, stages=tuple(_parted(stage, bucket_bytes) for stage in plan.stages))


def _parted(stage: Stage, bucket_bytes: float) -> Stage:
    kernel = stage.kernel
    if not isinstance(kernel, GraphKernel) or kernel.functional_backward is None:
        return stage
    trained = [index for index, has in enumerate(kernel.parameter_gradients) if has]
    gradients = results(kernel.functional_backward)[kernel.input_gradients :]
    gradient_of = dict(zip(trained, gradients, strict=True))
    members = list(_filled(gradient_of, kernel.functional_backward, bucket_bytes))
    if len(members) < 2:
        return stage
    members[-1] += [index for index, has in enumerate(kernel.parameter_gradients) if not has]
    graphs: dict[str, list[BucketGraph]] = {}
    for kind, graph, inputs in (
        ("B", kernel.functional_backward, kernel.input_gradients),
        ("W", kernel.functional_weight_grad, 0),
    ):
        if graph is not None:
            name = f"Stage{stage.index}Bucket{kind}"
            graphs[kind] = _split(deepcopy(graph), members, trained, inputs, name)
    buckets = tuple(map(tuple, members))
    return replace(stage, kernel=replace(kernel, buckets=graphs), buckets=buckets)


def _filled(
    gradients: Mapping[int, Any], graph: fx.Graph, bucket_bytes: float
) -> Iterator[list[int]]:
    """The parameters of each bucket, in the order in which a backward makes their gradients."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    bucket: list[int] = []
    size = 0
    for index in sorted(gradients, key=lambda index: order[_maker(gradients[index])]):
        bucket.append(index)
        size += size_in_bytes(gradients[index].meta["val"])
        if size >= bucket_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _split(
    graph: fx.Graph,
    buckets: Sequence[Sequence[int]],
    trained: Sequence[int],
    inputs: int,
    name: str,
) -> list[BucketGraph]:
    """The graph of each bucket.

    A graph computes what its gradients need and no graph before it has computed; the last graph
    computes all the rest.

    Args:
        graph: the whole backward, or its second half; functional.
        buckets: the parameters of each bucket.
        trained: the parameters with a gradient, in the order of the graph's results.
        inputs: how many results come before these gradients.
        name: what the graphs are called.
    """
    returned = results(graph)
    of_inputs, gradient_of = returned[:inputs], dict(zip(trained, returned[inputs:], strict=True))
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    early = set(arguments)
    rest = [node for node in graph.nodes if node.op == "call_function"]
    graphs: list[BucketGraph] = []
    for number, bucket in enumerate(buckets):
        parameters = tuple([index for index in sorted(bucket) if index in gradient_of])
        gradients = [gradient_of.pop(index) for index in parameters]
        last = number == len(buckets) - 1
        needed = set(rest) if last else ancestors(gradients)
        # a part of an operation's result is taken in the graph of the operation
        needed.update(node for node in rest if is_part(node) and node.args[0] in needed)
        nodes = [node for node in rest if node in needed]
        rest = [node for node in rest if node not in needed]
        early.update(nodes)
        later = [*of_inputs, *gradient_of.values()]
        handed_on = of_inputs if last else crossing(rest, later, early)
        taken = extract(arguments, nodes, [*handed_on, *gradients])
        module = runnable(taken, name, len(handed_on))
        graphs.append(BucketGraph(module, len(handed_on), parameters))
        arguments = handed_on
    return graphs


def _maker(node: Any) -> fx.Node:
    """The node that computes a gradient, before it is only copied or viewed."""
    while node.op == "call_function" and (
        shares_memory(node) or node.target is torch.ops.aten.clone.default
    ):
        node = node.all_input_nodes[0]
    return node  # type: ignore[no-any-return]
