"""Give stages with leaf modules their kernels.

Nothing is derived: autograd runs the backward in every step. One real run shows which gradients
there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.extensions.leaf_modules.kernel import AutogradKernel
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.value import Edge
from fxpipe.passes.differentiate.differentiate import Differentiator, Wanted
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.torchtools import source
from fxpipe.torchtools.state import under


def differentiate_leaves(
    plan: Plan, values: Mapping[str, Any], state: Mapping[str, Tensor], wanted: Wanted
) -> Plan:
    """Plan → Plan: give stages with leaf modules their kernels, edges their ``gradient``, and
    values their specs. Arguments are those of ``differentiate``."""
    with under(()):  # no autocast, as in a stage's thread
        return _Probe(plan, values, state, wanted).run()


class _Probe(Differentiator):
    """Runs every stage once, forward and backward."""

    def forward(self, stage: Stage) -> None:
        names = self.returned(stage)
        flags = [self.needs_gradient(edge) for edge in self.incoming(stage)]
        kernel = self._kernel(stage, flags, flags, [True] * len(names))
        with source.refusing_failures(gradients=kernel.recording):
            result = kernel.forward(*self.arguments(stage))
        self.forwards[stage.index] = result.saved
        self.note(stage, result.saved[0] if names else [])

    def backward(self, stage: Stage) -> None:
        names = self.returned(stage)
        flags = [self.needs_gradient(edge) for edge in self.incoming(stage)]
        outputs, sources, _ = self.forwards.pop(stage.index) or ([], [], [])
        totals = [self.total_gradient(name) for name in names]
        roots = [out for out, total in zip(outputs, totals, strict=True) if total is not None]
        wanted = [x for x, needs in zip(sources, flags, strict=False) if needs]
        gradients: Iterator[Tensor | None] = repeat(None)
        if roots and wanted:
            seeds = [total for total in totals if total is not None]
            gradients = iter(torch.autograd.grad(roots, wanted, seeds, allow_unused=True))
        has_gradient: list[bool] = []
        for edge, needs in zip(self.incoming(stage), flags, strict=True):
            gradient = next(gradients) if needs else None
            has_gradient.append(gradient is not None)
            if gradient is not None:
                self.gradients[edge.value, stage.index] = gradient
        output_gradients = [total is not None for total in totals]
        self.kernels[stage.index] = self._kernel(stage, flags, has_gradient, output_gradients)

    def _kernel(
        self,
        stage: Stage,
        differentiable: Sequence[bool],
        input_gradients: Sequence[bool],
        output_gradients: Sequence[bool],
    ) -> AutogradKernel:
        return AutogradKernel(
            _callable(stage, self.incoming(stage), self.returned(stage)),
            parameters=[a.target for a in stage.parameters],
            buffers=[a.target for a in stage.buffers],
            written=[write.target for write in stage.writes],
            differentiable=differentiable,
            input_gradients=input_gradients,
            output_gradients=output_gradients,
            recording=bool(self.wanted.outputs),
        )


def _callable(stage: Stage, incoming: Sequence[Edge], returned: Sequence[str]) -> fx.GraphModule:
    """The graph of a stage, with the values of ``incoming`` edges as inputs and
    the ``returned`` values as outputs, both in order."""
    graph = fx.Graph()
    nodes = {node.name: node for node in stage.graph.graph.nodes}
    copies: dict[fx.Node, fx.Node] = {}
    for edge in incoming:
        copies[nodes[edge.value]] = graph.placeholder(edge.value)
    for node in stage.graph.graph.nodes:
        if node in copies or node.op == "output":
            continue
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[nodes[name]] for name in returned))
    graph.lint()
    return lazy_module(stage.graph, graph, f"Stage{stage.index}Forward")
