"""Measure what each node of a graph with leaf modules costs: each is timed alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpipe.errors import InputError, told
from fxpipe.ir.traced import AUTOCAST, Traced
from fxpipe.passes.partition.measure import NodeCost, Stopwatch
from fxpipe.torchtools import source
from fxpipe.torchtools.pytrees import bytes_of
from fxpipe.torchtools.state import under

_REPEATS = 3
"""How often a node is timed."""


def measure_leaves(
    traced: Traced, values: Mapping[str, Any], watch: Stopwatch | None = None
) -> dict[str, NodeCost]:
    """Run a graph with leaf modules node by node, and time each node alone.

    Arguments are those of ``measure``. The run must not change the model's state: call this under
    ``untouched``.
    """
    held = (*values.values(), *traced.module.parameters())
    meter = _Meter(traced.module, watch or Stopwatch.of(held))
    meter.run(*(values[n.name] for n in traced.graph.nodes if n.op == "placeholder"))
    return meter.costs


class _Meter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, watch: Stopwatch) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.extra_traceback = False
        self._watch = watch
        self.costs: dict[str, NodeCost] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output", "get_attr"):
            value = super().run_node(n)
            self.costs[n.name] = NodeCost(0.0, 0.0, bytes_of(value))
            return value
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        times: list[tuple[float, float]] = []
        value = None
        for _ in range(_REPEATS):
            with torch.enable_grad():
                copy = _copied if n.op == "call_module" else _cut
                inputs = pytree.tree_map(copy, (args, kwargs))
                start = self._watch.mark()
                where = source.of_node(n) or repr(n.target)
                with source.refusing_failures(where), under(n.meta.get(AUTOCAST, ())):
                    value = getattr(self, n.op)(n.target, *inputs)
                end = self._watch.mark()
                backward = self._backward(n, value, inputs)
            (forward,) = self._watch.seconds([(start, end)])
            times.append((forward, backward))
        forward, backward = map(min, zip(*times, strict=True))
        # under autograd the first half of the backward computes all gradients
        self.costs[n.name] = NodeCost(forward, backward, bytes_of(value), input_grad=backward)
        return pytree.tree_map(_cut, value)

    def _backward(self, n: fx.Node, value: Any, inputs: Any) -> float:
        """Time the gradient of a node's value with respect to what it read."""
        outputs = [leaf for leaf in pytree.tree_leaves(value) if _differentiable(leaf)]
        sources = [leaf for leaf in pytree.tree_leaves(inputs) if _differentiable(leaf)]
        if n.op == "call_module":
            sources += [p for p in self.fetch_attr(str(n.target)).parameters() if p.requires_grad]
        if not outputs or not sources:
            return 0.0
        ones = [torch.ones_like(output) for output in outputs]
        start = self._watch.mark()
        try:
            torch.autograd.grad(outputs, sources, ones, allow_unused=True)
        except Exception as error:
            raise InputError(
                f"the backward of {n.target!r} fails on the first micro-batch ({told(error)}); "
                "correct it"
            ) from error
        (seconds,) = self._watch.seconds([(start, self._watch.mark())])
        return seconds


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _cut(value: Any) -> Any:
    """Cut a tensor off its autograd history."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _copied(value: Any) -> Any:
    """Copy a tensor, so that a module may change it in place; autograd forbids that for leaves."""
    cut = _cut(value)
    return cut.clone() if isinstance(cut, Tensor) else cut
