"""Choose whether one thread or one per device runs the lists of CPU devices.

A thread releases the interpreter lock at every operation, and to get it back it may have to wait
for a hand-over, which costs microseconds. Operations on few elements take less than that, so that
one thread runs them faster one after another.
"""

from __future__ import annotations

import operator
from typing import Any, Literal

from torch import Tensor, fx

from fxpipe.ir.plan import Plan
from fxpipe.kernels.graph import is_compiled
from fxpipe.torchtools.state import processors

Dispatches = Literal["device", "thread"]
"""Which threads run or launch the devices' lists: one for each device, or one for all."""

SMALL = 2**14
"""Operations are worth a thread for each device if the largest tensor of each has at least this
many elements on average. A product of 128 × 128 weights and 32 rows takes about a hand-over."""


class ThreadChoice:
    """For each plan, whether each device has its own thread.

    Attributes:
        most: the greatest number of threads that any plan may need.
    """

    def __init__(self, devices: int, dispatch: Dispatches | None) -> None:
        """Choose later for each plan, unless ``dispatch`` is given for all plans."""
        self.most = 1 if dispatch == "thread" else devices
        self._fixed = dispatch is not None or devices == 1

    def threads(self, plan: Plan) -> int:
        """How many threads run the devices' lists: 1, or one for each device."""
        if self._fixed:
            return self.most
        return 1 if processors() == 1 or elements(plan) < SMALL else self.most


def elements(plan: Plan) -> float:
    """The elements of the largest tensor that an operation of the forwards reads or makes, on
    average. A compiled graph is one operation on all of its tensors."""
    sizes: list[int] = []
    for stage in plan.stages:
        graph = stage.forward
        if graph is None:
            continue
        own = [_largest(graph, node) for node in graph.graph.nodes if _computes(node)]
        sizes += [sum(own)] if is_compiled(graph) else filter(None, own)
    return sum(sizes) / len(sizes) if sizes else 0.0


def _computes(node: fx.Node) -> bool:
    return node.op.startswith("call_") and node.target is not operator.getitem


def _largest(graph: fx.GraphModule, node: fx.Node) -> int:
    values: list[Any] = [each.meta.get("val") for each in (*node.all_input_nodes, node)]
    if node.op == "call_module":
        values += graph.get_submodule(str(node.target)).parameters()
    return max((int(x.numel()) for x in values if isinstance(x, Tensor)), default=0)
