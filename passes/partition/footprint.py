"""Estimate what stays in memory: parameters with their optimizer state, and saved values.

It is estimated on the whole model as a single stage. A value that is sent from stage to stage may
be kept by both, because what a stage receives counts as saved there, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.differentiate.joint import ORIGIN
from fxpipe.passes.partition.assignment import compute_nodes
from fxpipe.passes.partition.atoms import Footprint
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.torchtools.pytrees import memory, size_in_bytes


def footprint_of(
    traced: Traced,
    plan: Plan | None,
    costs: Mapping[str, NodeCost],
    state: Mapping[str, Tensor],
    copies: float,
    undo: float = 0.0,
) -> Footprint:
    """What each parameter and buffer occupies, and what each node keeps for a micro-batch.

    Args:
        traced: the graph.
        plan: the same graph as a single stage, differentiated; None for a graph with leaf modules,
            of which every value counts as saved.
        costs: node → what it costs.
        state: name in the model → parameter, buffer or constant.
        copies: how many tensors of its size a trained parameter needs: its versions, its gradient
            and its optimizer state.
        undo: how many more it needs after its update, to be able to undo it, when the saved values
            are freed.
    """
    trained = {
        argument.target for argument in traced.parameters if state[argument.target].requires_grad
    }
    resident = {
        a.target: int(size_in_bytes(state[a.target]) * (copies if a.target in trained else 1))
        for a in (*traced.parameters, *traced.buffers)
    }
    undoing = {target: int(size_in_bytes(state[target]) * undo) for target in trained}
    if plan is not None:
        return Footprint(resident, _saved(plan), undoing)
    kept = {node.name: costs[node.name].bytes for node in compute_nodes(traced.graph)}
    return Footprint(resident, kept, undoing)


def _saved(plan: Plan) -> dict[str, int]:
    """Node → bytes of the saved tensors that it makes; views of one memory count once."""
    (stage,) = plan.stages
    kernel = stage.kernel
    assert isinstance(kernel, GraphKernel)
    graph = kernel.forward_graph.graph
    seen = {_memory(node) for node in graph.nodes if node.op == "placeholder"}
    returned = next(node for node in graph.nodes if node.op == "output").args[0]
    saved: dict[str, int] = {}
    for node in returned[kernel.outputs + kernel.writes :]:
        value = node.meta.get("val")
        if node.op == "placeholder" or not isinstance(value, Tensor) or _memory(node) in seen:
            continue
        seen.add(_memory(node))
        origin = node.meta.get("custom", {}).get(ORIGIN, "")
        saved[origin] = saved.get(origin, 0) + size_in_bytes(value)
    return saved


def _memory(node: torch.fx.Node) -> int | None:
    value = node.meta.get("val")
    return memory(value) if isinstance(value, Tensor) else None
