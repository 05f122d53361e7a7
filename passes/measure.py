"""Measure what each node of a functional graph costs, in the graphs that will run.

before:  conv2d = aten.conv2d.default(x, weight)
after:   {"conv2d": NodeCost(forward=1.1e-3, backward=2.3e-3, bytes=262144)}

The whole model is differentiated as a single stage, and every operation of its graphs, forward,
backward and the halves of backward, is timed in its place; what autograd does for a node counts
as that node's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.joint import BYTES, ORIGIN
from fxpipe.plan import Plan
from fxpipe.stopwatch import Stopwatch, stopwatch_for
from fxpipe.traced import Traced

_REPEATS = 5


@dataclass(frozen=True)
class NodeCost:
    """What a node costs for one micro-batch.

    Attributes:
        forward: seconds, the best of some runs.
        backward: seconds; 0 where nothing needs a gradient.
        bytes: of its value, 0 where that is no tensor.
        input_grad: seconds in the first half of backward.
        weight_grad: seconds in the second half.
    """

    forward: float
    backward: float
    bytes: int
    input_grad: float = 0.0
    weight_grad: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def measure(
    traced: Traced,
    plan: Plan,
    values: Mapping[str, Any],
    state: Mapping[str, Tensor],
    watch: Stopwatch | None = None,
) -> dict[str, NodeCost]:
    """Time the one stage of a plan, operation by operation.

    Args:
        traced: the graph whose nodes are to be known.
        plan: the same graph as a single stage, differentiated and its backward parted.
        values: a value for each input, by name.
        state: name in the model → parameter, buffer or constant.
        watch: takes the time; by default the one for where the values are.
    """
    (stage,) = plan.stages
    kernel = stage.kernel
    assert isinstance(kernel, GraphKernel)
    arguments = [
        *(state[argument.target] for argument in (*stage.parameters, *stage.buffers)),
        *(values[edge.value] for edge in plan.edges_into(0)),
    ]
    watch = watch or stopwatch_for(arguments)
    forward = _Timer(kernel.forward_graph, watch)
    backward, input_grad, weight_grad = (
        None if graph is None else _Timer(graph, watch)
        for graph in (stage.backward, stage.input_grad, stage.weight_grad)
    )
    kept = kernel.outputs + kernel.writes
    trained = zip(stage.parameters, kernel.parameter_gradients, strict=True)
    totals = [torch.zeros_like(state[argument.target]) for argument, has in trained if has]
    with torch.no_grad():
        for _ in range(_REPEATS):
            flat = forward.run(*arguments)
            if backward is not None:
                gradients = [torch.ones_like(flat[index]) for index in kernel.gradient_outputs]
                backward.run(*flat[kept:], *gradients, *totals)
                if input_grad is not None:
                    found = input_grad.run(*flat[kept:], *gradients)
                    if weight_grad is not None:
                        weight_grad.run(*found[kernel.input_gradients :], *totals)
    sizes = {node.name: node.meta[BYTES] for node in stage.graph.graph.nodes}
    ahead, back, first, then = (
        {} if timer is None else timer.by_origin()
        for timer in (forward, backward, input_grad, weight_grad)
    )
    return {
        node.name: NodeCost(
            ahead.get(node.name, 0.0),
            back.get(node.name, 0.0),
            sizes.get(node.name, 0),
            first.get(node.name, 0.0),
            then.get(node.name, 0.0),
        )
        for node in traced.graph.nodes
    }


class _Timer(fx.Interpreter):
    """Keeps the best time of each node over the runs."""

    def __init__(self, module: fx.GraphModule, watch: Stopwatch) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.best: dict[fx.Node, float] = {}
        self._watch = watch
        self._spans: dict[fx.Node, tuple[Any, Any]] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        value = super().run(*args, **kwargs)
        spans, self._spans = self._spans, {}
        found = self._watch.seconds(list(spans.values()))
        for node, seconds in zip(spans, found, strict=True):
            self.best[node] = min(seconds, self.best.get(node, seconds))
        return value

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        start = self._watch.mark()
        value = n.target(*args, **kwargs)  # type: ignore[operator]
        self._spans[n] = start, self._watch.mark()
        return value

    def by_origin(self) -> dict[str, float]:
        """Node of the traced graph → seconds of all that was made of it."""
        total: dict[str, float] = {}
        for node, seconds in self.best.items():
            origin = node.meta.get("custom", {}).get(ORIGIN, "")
            total[origin] = total.get(origin, 0.0) + seconds
        return total
