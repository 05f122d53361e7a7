"""Stages under autograd: what they cost is measured, and their backwards come in two steps."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

from fxpipe.extensions.leaf_modules.differentiate import differentiate_leaves
from fxpipe.extensions.leaf_modules.measure import measure_leaves
from fxpipe.passes.differentiate.differentiate import Wanted
from fxpipe.passes.differentiate.part_backward import part_backward
from fxpipe.passes.partition.assignment import Assignment, compute_nodes
from fxpipe.passes.partition.cut import cut
from fxpipe.passes.partition.measure import Stopwatch
from fxpipe.torchtools.state import untouched
from tests.extensions.leaf_modules.leaf_tracer import LeavesOnly, leaf_graph
from tests.helpers.fronted import assert_equal, run_plan, values_of
from tests.helpers.halves import assert_same
from tests.partition import test_measure
from tests.partition.test_measure import Counting


def test_leaves_are_timed_alone_with_their_hooks() -> None:
    slept = 0.0

    def sleep(*_: Any) -> None:
        nonlocal slept
        slept += 0.1

    watch = Stopwatch(clock=lambda: time.thread_time() + slept)
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
    model[1].register_forward_hook(sleep)
    x = torch.randn(3, 4)
    traced = leaf_graph(model, x)
    before = copy.deepcopy(model.state_dict())
    with untouched(model):
        costs = measure_leaves(traced, {str(traced.inputs[0]): x}, watch)
    assert_equal(model.state_dict(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {node.name for node in compute_nodes(traced.graph)} <= set(costs)
    slow = max(costs, key=lambda name: costs[name].forward)
    assert costs[slow].forward >= 0.1
    assert slow in {n.name for n in traced.graph.nodes if n.target == "1"}
    assert all(
        costs[n.name].bytes == 3 * 4 * 4 for n in traced.graph.nodes if n.op == "call_module"
    )
    (linear,) = (n.name for n in traced.graph.nodes if n.target == "0")
    assert costs[linear].backward > 0
    assert all(cost.input_grad == cost.backward for cost in costs.values())
    assert all(cost.weight_grad == 0 for cost in costs.values())


def test_leaves_are_timed_by_the_device_too() -> None:
    model, x, watch = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4), Counting()
    traced = leaf_graph(model, x)
    costs = measure_leaves(traced, {str(traced.inputs[0]): x}, watch)
    calls = [costs[n.name] for n in traced.graph.nodes if n.op.startswith("call")]
    assert [(cost.forward, cost.backward) for cost in calls] == [(1, 1), (1, 1)]


@pytest.mark.smoke
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_stage_under_autograd_hands_over_its_gradients_in_two_steps(stages: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.Flatten()
    )
    x = torch.randn(3, 2, 8, 8, requires_grad=True)
    traced = leaf_graph(model, x)
    nodes = compute_nodes(traced.graph)
    assignment = Assignment(
        stages, {node.name: place * stages // len(nodes) for place, node in enumerate(nodes)}
    )
    outputs = frozenset(edge.value for edge in cut(traced, assignment, {}).edges if edge.target < 0)
    wanted = Wanted(outputs, inputs=True)
    plan = cut(traced, assignment, {})
    plan = differentiate_leaves(plan, values_of(traced, x), traced.state_of(model), wanted)
    parted = part_backward(plan)
    for stage in parted.stages:
        kernel = stage.kernel
        assert kernel is not None
        assert stage.input_grad is stage.weight_grad is None
    found = [
        run_plan(copy.deepcopy(model), traced, each, x, halves=halves).gradients
        for each, halves in ((plan, False), (parted, True))
    ]
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) == len(list(model.parameters()))
    assert_same(list(found[0].values()), list(found[1].values()))


@pytest.mark.smoke
def test_a_stages_costs_are_those_of_its_nodes() -> None:
    test_measure.test_a_stages_costs_are_those_of_its_nodes([LeavesOnly()])
