"""Split the last backward of every stage at buckets of gradients, whose sums then begin earlier.

before:  backward:  t = tanh_backward(g, y);  b = mm(t, z);  u = mm(w, t);  a = mm(u, x)
                    return (a, b)
after:   bucket 0:  t = tanh_backward(g, y);  b = mm(t, z);  return (x, w, t, b)
         bucket 1:  u = mm(w, t);  a = mm(u, x);  return (a,)

While the second graph runs, the first one's gradient is on its way between the replicas, as with
the buckets of ``DistributedDataParallel``. Micro-batches before the last one run the graph as a
whole. All operations are the same, and so are the gradients, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpipe.ir.plan import Bucket, Plan, Stage
from fxpipe.kernels.graph import BucketGraph, GraphKernel
from fxpipe.passes.differentiate.extract import (
    ancestors,
    crossing,
    extract,
    results,
    runnable,
    shares_memory,
)
from fxpipe.passes.differentiate.joint import ORIGIN
from fxpipe.passes.partition.assignment import is_part
from fxpipe.torchtools.pytrees import size_in_bytes

_HALVES = {"B": 0, "W": 1}
"""Letter of a backward task → where the times of a node have its own, see ``Costs.nodes``."""


def part_gradients(plan: Plan, bucket_bytes: float) -> Plan:
    """Plan → Plan: every stage's gradients go in buckets. Those of leaf modules go at once.

    Args:
        plan: a differentiated one; backwards in halves are split, too.
        bucket_bytes: a bucket is complete once it has as many bytes.
    """
    return replace(plan, stages=tuple(_parted(stage, bucket_bytes) for stage in plan.stages))


def _parted(stage: Stage, bucket_bytes: float) -> Stage:
    kernel = stage.kernel
    if not isinstance(kernel, GraphKernel) or kernel.functional_backward is None:
        return stage
    given = [index for index, has in enumerate(kernel.parameter_gradients) if has]
    gradients = results(kernel.functional_backward)[kernel.input_gradients :]
    made = dict(zip(given, gradients, strict=True))
    own = list(_filled(made, kernel.functional_backward, bucket_bytes))
    if len(own) < 2:
        return stage
    own[-1] += [index for index, has in enumerate(kernel.parameter_gradients) if not has]
    graphs, shares = dict[str, list[BucketGraph]](), list[dict[str, float]]([{} for _ in own])
    for kind, graph, inputs in (
        ("B", kernel.functional_backward, kernel.input_gradients),
        ("W", kernel.functional_weight_grad, 0),
    ):
        if graph is None:
            continue
        named = f"Stage{stage.index}Bucket{kind}"
        graphs[kind], seconds = _split(deepcopy(graph), own, given, inputs, named, stage, kind)
        total = sum(seconds)
        for share, time in zip(shares, seconds, strict=True):
            share[kind] = time / total if total else 1 / len(own)
    buckets = [Bucket(tuple(each), share) for each, share in zip(own, shares, strict=True)]
    return replace(stage, kernel=replace(kernel, buckets=graphs), buckets=tuple(buckets))


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
    given: Sequence[int],
    inputs: int,
    named: str,
    stage: Stage,
    kind: str,
) -> tuple[list[BucketGraph], list[float]]:
    """The graph of each bucket, and what it costs: of what a gradient needs, each has what those
    before it have not computed, and the last one has all else.

    Args:
        graph: of the whole backward, or of its second half; functional.
        buckets: the parameters of each.
        given: those with a gradient, in the order of the graph's results.
        inputs: how many results come before these.
        named: the name of the graphs.
        stage: the stage, with what its nodes cost.
        kind: "B" or "W".
    """
    found = results(graph)
    of_inputs, gradient_of = found[:inputs], dict(zip(given, found[inputs:], strict=True))
    left = [node for node in graph.nodes if node.op == "placeholder"]
    known, rest = set(left), [node for node in graph.nodes if node.op == "call_function"]
    cost_of = _costs(rest, stage, kind)
    made: list[BucketGraph] = []
    seconds: list[float] = []
    for number, bucket in enumerate(buckets):
        parameters = tuple([index for index in sorted(bucket) if index in gradient_of])
        found = [gradient_of.pop(index) for index in parameters]
        last = number == len(buckets) - 1
        needed = set(rest) if last else ancestors(found)
        # one result of an operation with several is picked where the operation is
        needed.update(node for node in rest if is_part(node) and node.args[0] in needed)
        nodes = [node for node in rest if node in needed]
        rest = [node for node in rest if node not in needed]
        known.update(nodes)
        after = [*of_inputs, *gradient_of.values()]
        next_ = of_inputs if last else crossing(rest, after, known)
        module = runnable(extract(left, nodes, [*next_, *found]), named, len(next_))
        made.append(BucketGraph(module, len(next_), parameters))
        seconds.append(sum(cost_of[node] for node in nodes))
        left = next_
    return made, seconds


def _costs(nodes: Sequence[fx.Node], stage: Stage, kind: str) -> Mapping[fx.Node, float]:
    """What each node costs: its part of what was measured for the node that it was made from, or,
    where nothing was, the bytes that it makes."""
    origins = [node.meta.get("custom", {}).get(ORIGIN, "") for node in nodes]
    sizes = [1.0 + _bytes(node) for node in nodes]
    total: dict[str, float] = {}
    for origin, size in zip(origins, sizes, strict=True):
        total[origin] = total.get(origin, 0.0) + size
    measured = {} if stage.costs is None else stage.costs.nodes
    if not any(measured[origin][_HALVES[kind]] for origin in total if origin in measured):
        return dict(zip(nodes, sizes, strict=True))
    return {
        node: measured.get(origin, (0.0, 0.0))[_HALVES[kind]] * size / total[origin]
        for node, origin, size in zip(nodes, origins, sizes, strict=True)
    }


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.nbytes if isinstance(value, torch.Tensor) and not shares_memory(node) else 0


def _maker(node: Any) -> fx.Node:
    """The node that computes a gradient, which later ones only copy or view."""
    while node.op == "call_function" and (
        shares_memory(node) or node.target is torch.ops.aten.clone.default
    ):
        node = node.all_input_nodes[0]
    return node  # type: ignore[no-any-return]
