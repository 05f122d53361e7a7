"""What the nodes of a differentiated graph take, by their FLOPs and bytes: nothing runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from fxpipe.extensions.paper.operations import Operation, operation, uncounted, warn_of
from fxpipe.ir.called import Called
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import BYTES, ORIGIN, Traced
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.partition.measure import NodeCost


def operations_of(
    traced: Traced, plan: Plan, seconds: Callable[[Operation], float]
) -> dict[str, NodeCost]:
    """Node of a traced graph → its cost: the seconds of all operations made from it.

    The logger "fxpipe" says of which operations no FLOPs are counted, though they may have some.

    Args:
        traced: the graph.
        plan: the same as one stage, differentiated.
        seconds: of an operation.
    """
    (stage,) = plan.stages
    kernel = stage.kernel
    assert isinstance(kernel, GraphKernel)
    unknown = Counter[str]()
    graphs = kernel.forward_graph, stage.backward, stage.input_grad, stage.weight_grad
    parts = [{} if g is None else _by_origin(g, seconds, unknown) for g in graphs]
    warn_of(unknown)
    sizes = {node.name: node.meta[BYTES] for node in stage.graph.graph.nodes}
    costs: dict[str, NodeCost] = {}
    for node in traced.graph.nodes:
        ahead, back, first, second = (part.get(node.name, 0.0) for part in parts)
        costs[node.name] = NodeCost(ahead, back, sizes.get(node.name, 0), first, second)
    return costs


def _by_origin(
    module: fx.GraphModule, seconds: Callable[[Operation], float], unknown: Counter[str]
) -> dict[str, float]:
    total: dict[str, float] = {}
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = pytree.tree_map_only(
            fx.Node, lambda n: n.meta.get("val"), (node.args, node.kwargs)
        )
        if isinstance(node.target, Called) or uncounted(node.target):
            unknown[str(node.target)] += 1
        out: Any = node.meta.get("val")
        made = operation(node.target, args, kwargs, out)
        origin = node.meta.get("custom", {}).get(ORIGIN, "")
        if made is not None:
            total[origin] = total.get(origin, 0.0) + seconds(made)
    return total
