"""Estimates the memory of a model from its plan of one stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.compiler.options import Options
from fxpipe.ir.plan import Plan
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import ORIGIN, Traced
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.partition.assignment import compute_nodes
from fxpipe.passes.partition.atoms import Footprint
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.runtime.weights.live import settings
from fxpipe.runtime.weights.optimizer import GivenOptimizer
from fxpipe.torchtools.optimizers import copy_alone
from fxpipe.torchtools.pytrees import memory, size_in_bytes


def estimate_footprint(
    traced: Traced,
    plan: Plan | None,
    costs: Mapping[str, NodeCost],
    state: Mapping[str, Tensor],
    options: Options,
    schedule: Schedule,
) -> Footprint:
    """Estimate what parameters and buffers occupy, and what nodes keep for a micro-batch.

    Args:
        plan: the same graph as a single stage, differentiated; None under autograd, where
            every value counts as saved.
        schedule: says how many versions of a parameter there are.
    """
    state_of_each = state_size(options.optimizer) / (options.replicas if options.shards else 1)
    # how many tensors of its size a trained parameter needs: versions, gradient, optimizer state
    copies = max(schedule.delays) + 2 + state_of_each
    trained = {
        argument.target for argument in traced.parameters if state[argument.target].requires_grad
    }
    resident = {
        a.target: int(size_in_bytes(state[a.target]) * (copies if a.target in trained else 1))
        for a in (*traced.parameters, *traced.buffers)
    }
    if plan is not None:
        saved = _saved(plan)
    else:
        saved = {node.name: costs[node.name].bytes for node in compute_nodes(traced.graph)}
    return Footprint(resident, saved)


def state_size(given: GivenOptimizer | None) -> float:
    """The size of an optimizer's state, in multiples of the size of its parameters.

    A trial step on a small parameter tells it. Without an optimizer, or where the trial fails, it
    is Adam's, 2.0.
    """
    if given is None:
        return 2.0
    parameter = nn.Parameter(torch.zeros(4096))
    parameter.grad = torch.zeros(4096)
    try:
        if given.whole is None:
            optimizer = given.over([parameter])
        else:
            group = {**settings(given.whole.param_groups[0]), "params": [parameter]}
            optimizer = copy_alone(given.whole, [group])
        type(optimizer).step(optimizer)
        values = [x for state in optimizer.state.values() for x in state.values()]
    except Exception:
        return 2.0
    sizes = [x.numel() for x in values if isinstance(x, Tensor) and x.numel() > 1]
    return sum(sizes) / parameter.numel()


def _saved(plan: Plan) -> dict[str, int]:
    """Node → bytes of the saved tensors that it makes; tensors that share memory count once."""
    (stage,) = plan.stages
    kernel = stage.kernel
    assert isinstance(kernel, GraphKernel)
    graph = kernel.forward_graph.graph
    seen = {_memory(node) for node in graph.nodes if node.op == "placeholder"}
    returned: Any = graph.output_node().args[0]
    saved: dict[str, int] = {}
    for node in returned[kernel.outputs + kernel.writes :]:
        value = node.meta.get("val")
        if node.op == "placeholder" or not isinstance(value, Tensor) or _memory(node) in seen:
            continue
        seen.add(_memory(node))
        origin = node.meta.get("custom", {}).get(ORIGIN, "")
        saved[origin] = saved.get(origin, 0) + size_in_bytes(value)
    return saved


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return memory(value) if isinstance(value, Tensor) else None
