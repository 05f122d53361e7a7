"""Buckets of gradients: complete in their order, and equal to those of the whole to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.extensions.replicas.buckets import into_buckets
from fxpipe.ir.plan import Plan
from fxpipe.kernels.graph import GraphKernel
from fxpipe.kernels.kernel import BackwardResult, Totals, Wrapping
from fxpipe.passes.differentiate.part_backward import part_backward
from tests.helpers.fronted import differentiated, front_end, in_stages, run_plan
from tests.helpers.halves import assert_same
from tests.passes.differentiate.test_differentiate import cases as shared_cases
from tests.passes.differentiate.test_differentiate import made


class Bucketed(Wrapping):
    """A kernel whose backward runs the whole, and bucket by bucket, and compares them."""

    def __init__(self, kernel: GraphKernel, buckets: list[tuple[int, ...]]) -> None:
        super().__init__(kernel)
        self.own, self.buckets = kernel, buckets

    def backward(
        self, saved: list[Any], gradients: list[Tensor], totals: Totals = ()
    ) -> BackwardResult:
        seen = [x for x in (*saved, *gradients) if isinstance(x, Tensor)]
        # the workspace of oneDNN's recurrent layers is its own to write
        seen = [x for x in seen if x.dtype != torch.uint8]
        before = [x.clone() for x in seen]
        expected = self.own.backward([*saved], [*gradients])
        given = [None if g is None else torch.ones_like(g) for g in expected.parameters]
        summed = [None if g is None else 1 + g for g in expected.parameters]
        _, deferred = self.own.input_grad([*saved], [*gradients])
        for kind, first in ("B", [*saved, *gradients]), ("W", deferred):
            for start, right in ([], expected.parameters), (given, summed):
                left = [*first]
                totals = [None if x is None else x.clone() for x in start]
                for number, bucket in enumerate(self.buckets):
                    given_on = left
                    made = self.own.partial_backward(kind, number, left, totals)
                    assert given_on == []
                    left, totals = made
                    assert_same([totals[k] for k in bucket], [right[k] for k in bucket])
                    later = [k for own in self.buckets[number + 1 :] for k in own]
                    if not start:
                        assert [totals[k] for k in later] == [None] * len(later)
                assert_same(left, expected.inputs if kind == "B" else [])
                assert_same([*totals], [*right])
        assert_same(seen, before)
        saved.clear()
        return expected


def compare(plan: Plan) -> Plan:
    """The same plan, parted into buckets of one gradient, whose kernels compare what they do."""
    parted = into_buckets(part_backward(plan), 0)
    stages = []
    for stage in parted.stages:
        kernel, own = stage.kernel, [*stage.buckets]
        if own:
            assert isinstance(kernel, GraphKernel)
            assert sorted(k for each in own for k in each) == [*range(len(stage.parameters))]
            kernel = Bucketed(kernel, own)
        stages.append(replace(stage, kernel=kernel))
    return replace(parted, stages=tuple(stages))


@shared_cases
def test_buckets_equal_the_whole_to_the_bit(name: str) -> None:
    model, args, traced = made(name)
    plan = differentiated(model, traced, in_stages(traced, 1), *args, inputs=True)
    run_plan(model, traced, compare(plan), *args)


def layered() -> tuple[nn.Sequential, Any, Plan]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    traced = front_end(model, torch.randn(3, 4))
    plan = differentiated(model, traced, in_stages(traced, 1), torch.randn(3, 4), inputs=True)
    return model, traced, plan


@pytest.mark.smoke
def test_a_bucket_is_computed_before_the_layers_below_it() -> None:
    _, _, plan = layered()
    (stage,) = into_buckets(plan, 300).stages
    names = [[stage.parameters[k].target for k in each] for each in stage.buckets]
    assert names[0][:2] == ["4.bias", "4.weight"] or names[0][:2] == ["4.weight", "4.bias"]
    assert isinstance(stage.kernel, GraphKernel)
    graphs = [each.graph.graph for each in stage.kernel.buckets["B"]]
    whole = stage.backward
    assert whole is not None

    def products(graph: Any) -> int:
        return len(graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))

    assert sum(map(products, graphs)) == products(whole.graph)
    assert products(graphs[0]) < products(whole.graph)


def test_gradients_that_fill_one_bucket_are_not_parted() -> None:
    _, _, plan = layered()
    (stage,) = into_buckets(plan, 2**20).stages
    assert stage.buckets == () and stage == plan.stages[0]
    assert isinstance(stage.kernel, GraphKernel) and not stage.kernel.buckets
