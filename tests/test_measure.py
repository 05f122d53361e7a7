"""Measuring: every node has a time and the bytes of its value, and nothing is changed."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from examples.unet import UNet
from fxpipe.passes.measure import NodeCost, bytes_of, measure
from fxpipe.passes.measure_leaves import measure_leaves
from fxpipe.passes.partition import compute_nodes
from fxpipe.passes.symbolic import trace_symbolically
from fxpipe.untouched import untouched
from tests.fronted import (
    assert_equal,
    differentiated,
    front_end,
    run_graph,
    state_of,
    values_of,
    whole,
)


class Uneven(nn.Module):
    """The middle layer does by far the most work."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 512), nn.Linear(512, 8))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.middle(self.first(x))
        return self.last(y), y.argmax(1)


def measured(model: nn.Module, *args: Any) -> dict[str, NodeCost]:
    traced = front_end(model, *args)
    plan = differentiated(model, traced, whole(traced), *args)
    costs = measure(traced, plan, values_of(traced, *args), state_of(model, traced))
    assert set(costs) == {node.name for node in traced.graph.nodes}
    return costs


@pytest.mark.usefixtures("one_thread")
def test_the_heaviest_layer_costs_most_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "perf_counter", time.thread_time)  # whatever else keeps us waiting
    model, x = Uneven(), torch.randn(64, 8)
    costs = measured(model, x)
    linears = [costs[name] for name in costs if name.startswith("linear")]
    assert len(linears) == 5
    assert max(linears, key=lambda cost: cost.forward) is linears[2]
    assert max(linears, key=lambda cost: cost.backward) is linears[2]
    assert all(cost.seconds == cost.forward + cost.backward for cost in linears)


def test_what_has_no_gradient_costs_nothing_backward() -> None:
    costs = measured(Uneven(), torch.randn(64, 8))
    assert costs["argmax"].forward > 0
    assert costs["argmax"].backward == 0
    frozen = measured(Uneven().requires_grad_(False), torch.randn(64, 8))
    assert all(cost.backward == 0 for cost in frozen.values())


def test_bytes_are_those_of_the_values() -> None:
    model, x = UNet(channels=2, base=2, depth=2), torch.randn(3, 2, 8, 8)
    traced = front_end(model, x)
    costs = measured(model, x)

    class Sizes(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                assert costs[n.name].bytes == value.nbytes, n.name
            elif isinstance(value, tuple) and n.op != "output":
                assert costs[n.name].bytes == sum(v.nbytes for v in value)
            return value

    state, values = state_of(model, traced), values_of(traced, x)
    targets = {a.name: a.target for a in (*traced.parameters, *traced.buffers)}
    arguments = [
        state[targets[n.name]] if n.name in targets else values[n.name]
        for n in traced.graph.nodes
        if n.op == "placeholder"
    ]
    Sizes(traced.module).run(*arguments)


def test_measuring_changes_no_state() -> None:
    model, x = UNet(channels=2, base=2, depth=2), torch.randn(3, 2, 8, 8)
    before = copy.deepcopy(model.state_dict())
    measured(model, x)
    assert_equal(model.state_dict(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_random_models_are_measured_without_drawing_from_torch() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(3, 4)
    state = torch.get_rng_state()
    costs = measured(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(cost.forward for cost in costs.values()) > 0
    run_graph(model, front_end(model, x), x)


def test_leaves_are_timed_alone_with_their_hooks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
    model[1].register_forward_hook(lambda *_: time.sleep(0.1))
    x = torch.randn(3, 4)
    traced = trace_symbolically(model, (x,), {}, 3)
    before = copy.deepcopy(model.state_dict())
    with untouched(model):
        costs = measure_leaves(traced, {str(traced.inputs[0]): x})
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


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (torch.zeros(3, dtype=torch.float64), 24),
        (7, 0),
        ([torch.zeros(2), {"a": torch.zeros(1)}], 12),
    ],
)
def test_bytes_of_a_nest_are_those_of_its_tensors(value: Any, count: int) -> None:
    assert bytes_of(value) == count
