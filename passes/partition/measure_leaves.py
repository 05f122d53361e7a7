"""Measure the nodes of a graph with leaf modules: each alone, forward and backward.

before:  conv = self.conv(x)
after:   {"conv": NodeCost(forward=1.1e-3, backward=2.3e-3, bytes=262144)}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.measure import NodeCost, Stopwatch
from fxpipe.torchtools.pytrees import bytes_of

_REPEATS = 3


def measure_leaves(
    traced: Traced, values: Mapping[str, Any], watch: Stopwatch | None = None
) -> dict[str, NodeCost]:
    """Run the graph node by node and time each, alone.

    Args:
        traced: the graph; it must not change the model's state (see ``untouched``).
        values: a value for each input, by name.
        watch: takes the times; by default the stopwatch for the device of the values.
    """
    held = (*values.values(), *traced.module.parameters())
    meter = _Meter(traced.module, watch or Stopwatch.of(held))
    meter.run(*(values[n.name] for n in traced.graph.nodes if n.op == "placeholder"))
    return meter.costs


class _Meter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, watch: Stopwatch) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._watch = watch
        self.costs: dict[str, NodeCost] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output", "get_attr"):
            value = super().run_node(n)
            self.costs[n.name] = NodeCost(0.0, 0.0, bytes_of(value))
            return value
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        best: tuple[float, float] | None = None
        value = None
        for _ in range(_REPEATS):
            with torch.enable_grad():
                copy = _copied if n.op == "call_module" else _cut
                here_args, here_kwargs = pytree.tree_map(copy, (args, kwargs))
                start = self._watch.mark()
                value = getattr(self, n.op)(n.target, here_args, here_kwargs)
                middle = self._watch.mark()
                backward = self._backward(n, value, (here_args, here_kwargs))
            (forward,) = self._watch.seconds([(start, middle)])
            now = forward, backward
            best = now if best is None else (min(best[0], forward), min(best[1], backward))
        assert best is not None
        # autograd finds all gradients in the first half
        self.costs[n.name] = NodeCost(*best, bytes_of(value), input_grad=best[1])
        return pytree.tree_map(_cut, value)

    def _backward(self, n: fx.Node, value: Any, inputs: Any) -> float:
        """Seconds of the gradient of a node's value with respect to what it read."""
        outputs = [leaf for leaf in pytree.tree_leaves(value) if _differentiable(leaf)]
        sources = [leaf for leaf in pytree.tree_leaves(inputs) if _differentiable(leaf)]
        if n.op == "call_module":
            sources += [p for p in self.fetch_attr(str(n.target)).parameters() if p.requires_grad]
        if not outputs or not sources:
            return 0.0
        ones = [torch.ones_like(output) for output in outputs]
        start = self._watch.mark()
        torch.autograd.grad(outputs, sources, ones, allow_unused=True)
        (seconds,) = self._watch.seconds([(start, self._watch.mark())])
        return seconds


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _cut(value: Any) -> Any:
    """A tensor without its history."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _copied(value: Any) -> Any:
    """A tensor that a module may change in place: a copy, and no leaf of autograd's."""
    cut = _cut(value)
    return cut.clone() if isinstance(cut, torch.Tensor) else cut
