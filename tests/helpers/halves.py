"""A backward in halves, held against the whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.traced import Traced
from fxpipe.kernels.kernel import BackwardResult, ForwardResult, InputGradResult, Totals, Wrapping
from fxpipe.passes.differentiate.part_backward import part_backward
from tests.helpers.fronted import differentiated, front_end, in_stages, run_plan

aten = torch.ops.aten


class Compared(Wrapping):
    """A kernel whose backward runs the whole and the halves, and holds one against the other."""

    def forward(self, parameters: Any, buffers: Any, inputs: list[Any]) -> ForwardResult:
        self.given = [*parameters, *buffers, *inputs]
        self.result = self.kernel.forward(parameters, buffers, inputs)
        return self.result

    def backward(
        self, saved: list[Any], gradients: list[Tensor], totals: Totals = ()
    ) -> BackwardResult:
        seen = [*self.given, *self.result.outputs, *self.result.writes, *saved, *gradients]
        # the workspace of oneDNN's recurrent layers is its own to write
        seen = [x for x in seen if not (isinstance(x, Tensor) and x.dtype == torch.uint8)]
        before = [x.clone() if isinstance(x, Tensor) else x for x in seen]
        expected = self.kernel.backward(list(saved), list(gradients))
        given = Counter(id(x) for x in (*saved, *gradients))
        inputs, deferred = self.kernel.input_grad(saved, gradients)
        assert saved == gradients == []
        kept = [x.clone() for x in inputs]
        # nothing is kept twice, save for what came twice: one tensor may be two values' gradient
        assert all(
            count <= max(given[key], 1)
            for key, count in Counter(id(x) for x in deferred if x is not None).items()
        )
        parameters = self.kernel.weight_grad(deferred)
        assert deferred == []
        for ours, theirs in ((inputs, expected.inputs), (parameters, expected.parameters)):
            assert_same(ours, theirs)
            assert list(map(_strides, ours)) == list(map(_strides, theirs))
        assert_same(inputs, kept)
        self._assert_fresh(parameters, [*seen, *inputs])
        assert_same(seen, before)
        return expected

    def input_grad(self, saved: list[Any], gradients: list[Tensor]) -> InputGradResult:
        raise AssertionError

    def weight_grad(self, deferred: list[Any], totals: Totals = ()) -> list[Tensor | None]:
        raise AssertionError

    def _assert_fresh(self, found: list[Tensor | None], others: list[Any]) -> None:
        """The caller may add into a parameter's gradient, and nothing else changes."""
        storages = [x.untyped_storage().data_ptr() for x in others if isinstance(x, Tensor)]
        for gradient in found:
            if gradient is not None and gradient.numel():
                storage = gradient.untyped_storage().data_ptr()
                assert storage not in storages
                storages.append(storage)


def _strides(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tensor.stride()


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for here, there in zip(ours, theirs, strict=True):
        if not isinstance(there, Tensor):
            assert here is there or here == there
            continue
        assert (here.shape, here.dtype) == (there.shape, there.dtype)
        assert torch.equal(here.nan_to_num(7.0), there.nan_to_num(7.0))


def compare(model: nn.Module, traced: Traced, plan: Plan, *args: Any) -> Plan:
    """Part a plan, and run every stage both ways on what the stages around it give."""
    parted = part_backward(plan)
    assert parted == plan
    assert str(parted) == str(plan)
    assert all(stage.input_grad is None for stage in plan.stages)  # it is left as it was
    stages = []
    for stage in parted.stages:
        assert stage.kernel is not None
        stages.append(replace(stage, kernel=Compared(stage.kernel)))
    run_plan(model, traced, replace(parted, stages=tuple(stages)), *args)
    for stage in parted.stages:
        check_graphs(stage)
    return parted


def check_graphs(stage: Stage) -> None:
    """What is always true of the halves of a traced stage."""
    assert (stage.input_grad is None) == (stage.backward is None)
    if stage.input_grad is None or stage.weight_grad is None:
        return
    first, then = stage.input_grad.graph, stage.weight_grad.graph
    for node in then.nodes:
        assert node.users or node.op == "output"  # nothing is deferred, or done, for nobody
    for mask in masks(then):
        assert mask[1] or mask[2]
    for mask in masks(first):
        assert mask[0]
    # only convolutions are in both, a half in each
    work = [len(operations(graph)) for graph in (first, then)]
    assert stage.backward is not None
    parted = sum(mask == [True, False, False] for mask in masks(first))
    parted -= sum(mask == [True, False, False] for mask in masks(stage.backward.graph))
    assert sum(work) == len(operations(stage.backward.graph)) + parted


def operations(graph: fx.Graph) -> list[str]:
    """The names of the operations, those that write over an operand under their plain name."""
    return [
        node.target._schema.name.removeprefix("aten::").rstrip("_")
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    ]


def masks(graph: fx.Graph) -> list[list[bool]]:
    """For each convolution's backward whether it gives the gradient of input, weight and bias."""
    return [
        list(node.args[-1])
        for node in graph.nodes
        if node.target is aten.convolution_backward.default
    ]


def graphs(stage: Stage) -> tuple[fx.Graph, fx.Graph]:
    assert stage.input_grad is not None
    assert stage.weight_grad is not None
    return stage.input_grad.graph, stage.weight_grad.graph


def parted(
    model: nn.Module, x: Tensor, stages: int = 1, *, inputs: bool = False
) -> tuple[Stage, ...]:
    """The stages of a model, compared and parted."""
    x = x if inputs else x.detach()
    traced = front_end(model, x)
    assignment = in_stages(traced, stages)
    plan = differentiated(model, traced, assignment, x, inputs=inputs)
    return compare(model, traced, plan, x).stages
