"""What collectives of stages take: by the time of an all-reduce of few bytes and of one of many."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from fxpipe.extensions.tensor_parallel.collectives import (
    STAND_INS,
    all_gather_into_tensor,
    all_reduce,
)
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import ORIGIN
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.partition.measure import NodeCost

ROUNDS = 5
"""How often all ranks of a dimension run each all-reduce: as often on all, not by a clock."""

FEW, MANY = 1 << 8, 1 << 20
"""Elements of the two."""


class ColumnLink(NamedTuple):
    """The way to the other ranks of a dimension.

    Attributes:
        size: the ranks.
        latency: seconds that a collective takes at least.
        bandwidth: bytes a second that a rank sends.
    """

    size: int
    latency: float
    bandwidth: float

    def seconds(self, node: fx.Node) -> float:
        """The time of a collective, or of its stand-in."""
        value: Any = node.meta["val"] if _is(node, all_gather_into_tensor) else _given(node)
        sent: float = value.numel() * value.element_size() * (self.size - 1) / self.size
        return self.latency + sent * (2 if _is(node, all_reduce) else 1) / self.bandwidth


def way_of(dim: str) -> ColumnLink:
    """Time all-reduces over a dimension; all of its ranks call this at the same time."""
    c10d: Any = torch._C._distributed_c10d
    size = c10d._resolve_process_group(dim).size()
    least = {}
    for count in (FEW, MANY):
        x, times = torch.zeros(count), []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            all_reduce(x, "sum", dim)
            times.append(time.perf_counter() - begin)
        least[count] = min(times)
    sent = (MANY - FEW) * 4 * 2 * (size - 1) / size
    longer = least[MANY] - least[FEW]
    return ColumnLink(size, least[FEW], sent / longer if longer > 0 else math.inf)


def add_times(
    plan: Plan, costs: Mapping[str, NodeCost], ways: Mapping[str, ColumnLink]
) -> dict[str, NodeCost]:
    """What nodes cost, with their collectives and those of their backwards, by the plan of one
    stage in which stand-ins were measured. ``ways`` has the dimensions that are known."""
    (stage,) = plan.stages
    assert isinstance(stage.kernel, GraphKernel)
    graphs = {
        "forward": stage.kernel.forward_graph,
        "backward": stage.backward,
        "input_grad": stage.input_grad,
        "weight_grad": stage.weight_grad,
    }
    found = dict(costs)
    for part, graph in graphs.items():
        more = Counter[str]()
        for node in () if graph is None else graph.graph.nodes:
            if node.target in STAND_INS.values() and node.args[-1] in ways:
                origin = node.meta.get("custom", {}).get(ORIGIN, "")
                more[origin] += ways[str(node.args[-1])].seconds(node)  # type: ignore[assignment]
        for name in more.keys() & found.keys():
            known = getattr(found[name], part)
            found[name] = replace(found[name], **{part: known + more[name]})
    return found


def _is(node: fx.Node, collective: Callable[..., Any]) -> bool:
    return node.target is STAND_INS[collective]


def _given(node: fx.Node) -> Any:
    (given, *_) = node.all_input_nodes
    return given.meta["val"]
