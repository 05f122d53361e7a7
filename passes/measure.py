"""Measure what each node of a functional graph costs, in the graphs that will run.

before:  conv2d = aten.conv2d.default(x, weight)
after:   {"conv2d": NodeCost(forward=1.1e-3, backward=2.3e-3, bytes=262144)}

The whole model is differentiated as a single stage, and every operation of its forward and
backward graph is timed in its place; what autograd does for a node counts as that node's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxpipe.kernel import GraphKernel
from fxpipe.passes.joint import ORIGIN
from fxpipe.plan import Plan
from fxpipe.traced import Traced

_REPEATS = 5


@dataclass(frozen=True)
class NodeCost:
    """What a node costs for one micro-batch.

    Attributes:
        forward: seconds, the best of some runs.
        backward: seconds; 0 where nothing needs a gradient.
        bytes: of its value, 0 where that is no tensor.
    """

    forward: float
    backward: float
    bytes: int

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def measure(
    traced: Traced, plan: Plan, values: Mapping[str, Any], state: Mapping[str, Tensor]
) -> dict[str, NodeCost]:
    """Time the one stage of a plan, operation by operation.

    Args:
        traced: the graph whose nodes are to be known.
        plan: the same graph as a single stage, differentiated.
        values: a value for each input, by name.
        state: name in the model → parameter, buffer or constant.
    """
    (stage,) = plan.stages
    kernel = stage.kernel
    assert isinstance(kernel, GraphKernel)
    arguments = [
        *(state[argument.target] for argument in (*stage.parameters, *stage.buffers)),
        *(values[edge.value] for edge in plan.edges_into(0)),
    ]
    forward, backward = _Timer(kernel.forward_graph), None
    if kernel.backward_graph is not None:
        backward = _Timer(kernel.backward_graph)
    kept = kernel.outputs + kernel.writes
    with torch.no_grad():
        for _ in range(_REPEATS):
            flat = forward.run(*arguments)
            if backward is not None:
                gradients = [torch.ones_like(flat[index]) for index in kernel.gradient_outputs]
                backward.run(*flat[kept:], *gradients)
    sizes = _sizes(traced, values, state)
    ahead = forward.by_origin()
    back = {} if backward is None else backward.by_origin()
    return {
        node.name: NodeCost(
            ahead.get(node.name, 0.0), back.get(node.name, 0.0), sizes.get(node.name, 0)
        )
        for node in traced.graph.nodes
    }


def bytes_of(value: Any) -> int:
    """The bytes of a tensor, or of all tensors in a nest of values."""
    return sum(
        leaf.numel() * leaf.element_size()
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    )


class _Timer(fx.Interpreter):
    """Keeps the best time of each node over the runs."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.best: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        start = time.perf_counter()
        value = n.target(*args, **kwargs)  # type: ignore[operator]
        seconds = time.perf_counter() - start
        self.best[n] = min(seconds, self.best.get(n, seconds))
        return value

    def by_origin(self) -> dict[str, float]:
        """Node of the traced graph → seconds of all that was made of it."""
        total: dict[str, float] = {}
        for node, seconds in self.best.items():
            origin = node.meta.get("custom", {}).get(ORIGIN, "")
            total[origin] = total.get(origin, 0.0) + seconds
        return total


def _sizes(
    traced: Traced, values: Mapping[str, Any], state: Mapping[str, Tensor]
) -> dict[str, int]:
    """Node → bytes of its value, from a run without data."""
    mode = FakeTensorMode()
    targets = {a.name: a.target for a in (*traced.parameters, *traced.buffers)}
    sizes: dict[str, int] = {}

    class Sizes(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            sizes[n.name] = bytes_of(value)
            return value

    arguments = [
        state[targets[node.name]] if node.name in targets else values[node.name]
        for node in traced.graph.nodes
        if node.op == "placeholder"
    ]
    fake = [mode.from_tensor(a.detach()) if isinstance(a, Tensor) else a for a in arguments]
    with mode, torch.no_grad():
        Sizes(traced.module).run(*fake)
    return sizes
