"""Give stages with leaf modules their kernels.

Nothing is derived: autograd runs the backward in every step. One real run shows which gradients
there are, and what memory a stage takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor

from fxpipe.extensions.leaf_modules.counting import Counting
from fxpipe.extensions.leaf_modules.kernel import AutogradKernel, CountedBytes
from fxpipe.ir.plan import Plan, Stage
from fxpipe.passes.differentiate.differentiate import Differentiator, Wanted
from fxpipe.passes.differentiate.extract import extract
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.torchtools import source
from fxpipe.torchtools.pytrees import memory, size_in_bytes
from fxpipe.torchtools.state import under


def differentiate_leaves(
    plan: Plan, values: Mapping[str, Any], state: Mapping[str, Tensor], wanted: Wanted
) -> Plan:
    """Plan → Plan: give it ``gradients`` and specs, and its stages with leaf modules their
    kernels. Arguments are those of ``differentiate``."""
    with under(()):  # no autocast, as in a stage's thread
        return _Probe(plan, values, state, wanted).run()


class _Probe(Differentiator):
    """Runs every stage once, forward and backward."""

    def forward(self, stage: Stage) -> None:
        kernel, arguments = self._kernel(stage), self.arguments(stage)
        given = {memory(x) for x in chain(*arguments) if isinstance(x, Tensor)}
        counting = Counting(meta=True)
        with source.refusing_failures(gradients=kernel.recording), counting:
            result = kernel.forward(*arguments)
        made = [x for x in (*result.outputs, *result.writes) if isinstance(x, Tensor)]
        others = {memory(x): size_in_bytes(x) for x in made if memory(x) not in given}
        self.note(stage, result.saved[0] if result.outputs else [])
        saved = max(counting.alive - sum(others.values()), 0)
        counted = CountedBytes(saved, counting.peak)
        self.forwards[stage.index] = replace(kernel, counted=counted), result.saved, counting

    def backward(self, stage: Stage) -> None:
        kernel, saved, counting = self.forwards.pop(stage.index)
        totals = [self.total_gradient(name) for name in self.returned(stage)]
        seeds = [total for total in totals if total is not None]
        kernel = replace(kernel, output_gradients=[total is not None for total in totals])
        before = counting.peak = counting.alive
        inputs: list[Tensor | None] = []
        parameters: list[Tensor | None] = []
        kept = 0
        if seeds:
            kept = kernel.counted.saved
            with counting:
                inputs, parameters = kernel.differentiated(saved, seeds)
        gradients = iter(inputs)
        for edge, has in zip(self.incoming(stage), kernel.input_gradients, strict=True):
            gradient = next(gradients, None) if has else None
            if gradient is not None:
                self.gradients[edge.value, stage.index] = gradient
        counted = kernel.counted._replace(
            saved=kept,
            backward=counting.peak - before,
            gradients=sum(size_in_bytes(x) for x in parameters if x is not None),
        )
        edges = [(edge.value, stage.index) for edge in self.incoming(stage)]
        self.kernels[stage.index] = replace(
            kernel, input_gradients=[edge in self.gradients for edge in edges], counted=counted
        )

    def _kernel(self, stage: Stage) -> AutogradKernel:
        """The kernel of a stage all of whose inputs and outputs may have gradients."""
        incoming, names = self.incoming(stage), self.returned(stage)
        flags = [self.needs_gradient(edge) for edge in incoming]
        nodes = {node.name: node for node in stage.graph.graph.nodes if node.op != "output"}
        inputs = [nodes[edge.value] for edge in incoming]
        rest = [node for node in nodes.values() if node not in inputs]
        graph = extract(inputs, rest, [nodes[name] for name in names])
        return AutogradKernel(
            lazy_module(stage.graph, graph, f"Stage{stage.index}Forward"),
            parameters=[a.target for a in stage.parameters],
            buffers=[a.target for a in stage.buffers],
            written=[write.target for write in stage.writes],
            differentiable=flags,
            input_gradients=flags,
            output_gradients=[True] * len(names),
            recording=bool(self.wanted.outputs),
        )
