"""Measuring: every node has a time and the bytes of its value, and nothing is changed."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from examples.unet import UNet
from fxpipe.kernels.graph import GraphKernel
from fxpipe.log import telling
from fxpipe.passes import runner
from fxpipe.passes.differentiate.part_backward import part_backward
from fxpipe.passes.partition import measure as measuring
from fxpipe.passes.partition.measure import NodeCost, Stopwatch, host_clock, measure
from fxpipe.torchtools.pytrees import bytes_of
from tests.helpers.fronted import (
    assert_equal,
    differentiated,
    front_end,
    run_graph,
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
    plan = part_backward(differentiated(model, traced, whole(traced), *args))
    watch = Stopwatch(clock=time.thread_time)  # whatever else keeps us waiting
    costs = measure(traced, plan, values_of(traced, *args), traced.state_of(model), watch)
    assert set(costs) == {node.name for node in traced.graph.nodes}
    return costs


def test_the_heaviest_layer_costs_most_forward_and_backward() -> None:
    model, x = Uneven(), torch.randn(64, 8)
    costs = measured(model, x)
    linears = [costs[name] for name in costs if name.startswith("addmm")]
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
    assert all(cost.input_grad == cost.weight_grad == 0 for cost in frozen.values())


def test_the_halves_of_a_backward_are_timed_apart() -> None:
    model = nn.Sequential(nn.Conv2d(4, 16, 3), nn.SiLU(), nn.Conv2d(16, 16, 3))
    costs = measured(model, torch.randn(4, 4, 32, 32))
    first, last = (costs[name] for name in costs if name.startswith("convolution"))
    (silu,) = (costs[name] for name in costs if name.startswith("silu"))
    assert first.input_grad == 0  # the model's input wants no gradient
    assert first.weight_grad > 0
    assert last.input_grad > 0
    assert last.weight_grad > 0
    assert silu.input_grad > 0
    assert silu.weight_grad == 0
    for cost in (first, last, silu):
        assert 0.1 < (cost.input_grad + cost.weight_grad) / cost.backward < 10


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

    state, values = traced.state_of(model), values_of(traced, x)
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


def test_a_stages_costs_are_those_of_its_nodes(extensions: Any = ()) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(4, 4)
    example = (x,), {"target": x}
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        schedule="zb-h1",
        microbatches=2,
        loss=mse_loss,
        extensions=extensions,
        example=example,
    ) as pipe:
        for stage in pipe.plan.stages:
            costs = stage.costs
            assert costs is not None
            assert costs.input_grad is not None
            assert costs.weight_grad is not None
            assert costs.input_grad > 0
            assert (costs.weight_grad > 0) == (not extensions)
            assert (costs.input_grad == costs.backward) == bool(extensions)


@pytest.mark.traces
@pytest.mark.parametrize(("schedule", "times"), [("1f1b", 0), ("zb-h1", 2)])
def test_backwards_are_halved_and_measured_in_halves_only_if_the_schedule_splits_them(
    schedule: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def noting(name: str) -> AbstractContextManager[None]:
        ran.append(name)
        return telling(name)

    monkeypatch.setattr(runner, "telling", noting)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(4, 4)
    example = (x,), {"target": x}
    with fxpipe.compile(
        model, ["cpu"] * 2, schedule=schedule, microbatches=2, loss=mse_loss, example=example
    ) as pipe:
        assert ran.count("measure") == 1
        assert ran.count("part_backward") == times  # of what is measured, and of the stages
        for stage in pipe.plan.stages:
            kernel, costs = stage.kernel, stage.costs
            assert isinstance(kernel, GraphKernel) and costs is not None and costs.backward > 0
            assert (kernel.functional_backward is not None) == (times > 0)
            assert (costs.weight_grad is not None) == (costs.input_grad is not None) == (times > 0)


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


class Counting(Stopwatch):
    """A device that has done nothing until it is waited for: a second between any two marks."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = 0
        self.waits = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def seconds(self, spans: Sequence[tuple[int, int]]) -> list[float]:
        self.waits += 1
        return [float(end - start) for start, end in spans]


def test_a_device_that_is_behind_the_host_is_asked_for_its_own_times() -> None:
    model, x, watch = Uneven(), torch.randn(64, 8), Counting()
    traced = front_end(model, x)
    plan = part_backward(differentiated(model, traced, whole(traced), x))
    costs = measure(traced, plan, values_of(traced, x), traced.state_of(model), watch)
    times = [t for c in costs.values() for t in (c.forward, c.backward)]
    assert all(t == int(t) for t in times)  # whole seconds: how many operations there are
    kernel = plan.stages[0].kernel
    assert isinstance(kernel, GraphKernel)
    ran = [n for n in kernel.forward_graph.graph.nodes if n.op == "call_function"]
    assert 0 < sum(cost.forward for cost in costs.values()) <= len(ran)
    assert watch.waits in (2 * 4, 3 * 4, 4 * 4, 5 * 4)  # once a run of each of the four graphs


def test_whatever_else_the_processor_does_counts_for_no_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread computes for a second between two marks, and waits ever longer for its turn."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks)))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)) ** 2)
    monkeypatch.setattr(measuring, "host_clock", cache(host_clock.__wrapped__))
    watch = Stopwatch()
    marks = [watch.mark() for _ in range(9)]
    assert {later - earlier for earlier, later in itertools.pairwise(marks)} == {1.0}


def test_a_clock_that_ticks_seldom_times_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(calls) // 40 * 1e-2)
    assert host_clock.__wrapped__() is time.perf_counter
    monkeypatch.setattr(time, "thread_time", lambda: next(calls) * 1e-7)
    assert host_clock.__wrapped__() is time.thread_time


class Slowing(Counting):
    """A device on which everything takes longer than all that it did before, by so many units."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit = unit

    def mark(self) -> Any:
        self.marks += 1
        return self.marks**2 * self.unit


SHORT = 2.0**-40
"""Seconds, of which sums are exact."""


def slowing(
    model: nn.Module,
    x: Tensor,
    unit: float = SHORT,
    watch: Counting | None = None,
    share: bool = False,
) -> tuple[dict[str, NodeCost], Counting]:
    traced, watch = front_end(model, x), watch or Slowing(unit)
    plan = part_backward(differentiated(model, traced, whole(traced), x))
    values, state = values_of(traced, x), traced.state_of(model)
    return measure(traced, plan, values, state, watch, share), watch


def test_equal_layers_cost_the_same_and_are_run_twice() -> None:
    layers = [layer for _ in range(9) for layer in (nn.Linear(8, 8), nn.Tanh())]
    costs, watch = slowing(nn.Sequential(*layers), torch.randn(4, 8))
    linears = [costs[name] for name in costs if name.startswith("addmm")]
    tanhs = [costs[name] for name in costs if name.startswith("tanh")]
    assert len(linears) == len(tanhs) == 9
    assert len({cost.forward for cost in linears}) == 1
    assert len({cost.backward for cost in linears[1:]}) == 1
    assert linears[0].backward < linears[1].backward  # the model's input wants no gradient
    assert len({cost.forward for cost in tanhs}) == 1
    assert len({cost.backward for cost in tanhs[:-1]}) == 1  # the last is given its gradient
    assert watch.waits == 2 * 4


def test_equal_layers_run_as_often_as_they_are_timed_where_values_share_memory() -> None:
    def ran(layers: int, share: bool) -> int:
        model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))), torch.randn(4, 8)
        traced = front_end(model, x)
        plan = differentiated(model, traced, whole(traced), x)
        values, state = values_of(traced, x), traced.state_of(model)
        with Counted() as counted:
            costs = measure(traced, plan, values, state, share=share)
        assert all(costs[name].backward > 0 for name in costs if name.startswith("addmm"))
        products: int = counted.products
        return products

    assert ran(30, share=True) == ran(20, share=True) < ran(20, share=False)


class Counted(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += "mm" in func.__name__
        return func(*args, **(kwargs or {}))


class Unlike(nn.Module):
    """Operations that are alike in all but one thing."""

    def forward(self, x: Tensor) -> list[Tensor]:
        wide = torch.cat([x, x], 1)
        return [
            x.softmax(0),
            x.softmax(1),
            wide.softmax(1),
            x.T.softmax(1),
            x.double().softmax(1),
            x.softmax(1),
        ]


def test_what_differs_in_shape_layout_type_or_a_number_is_timed_apart() -> None:
    costs, watch = slowing(Unlike(), torch.randn(8, 8))
    times = [cost.forward for name, cost in costs.items() if name.startswith("_softmax")]
    assert len(times) == 6
    assert len(set(times)) == 5
    assert times[5] == times[1]
    assert watch.waits == 5  # what is there once is run often; nothing has a gradient


def test_what_takes_long_is_timed_once() -> None:
    costs, watch = slowing(Unlike(), torch.randn(8, 8), unit=1.0)
    times = [cost.forward for name, cost in costs.items() if name.startswith("_softmax")]
    assert len(set(times)) == 5 and times[5] == times[1]
    assert watch.waits == 2  # the first run warms up


def test_what_takes_long_is_timed_as_it_warms_up_where_values_share_memory() -> None:
    costs, watch = slowing(Unlike(), torch.randn(8, 8), unit=1.0, share=True)
    assert len({cost.forward for name, cost in costs.items() if name.startswith("_softmax")}) == 5
    assert watch.waits == 1


class Even(Counting):
    """A device on which everything takes equally long."""

    def seconds(self, spans: Sequence[tuple[int, int]]) -> list[float]:
        return [SHORT * each for each in super().seconds(spans)]


@pytest.mark.parametrize("share", [False, True])
def test_what_takes_as_long_again_is_timed_twice(share: bool) -> None:
    costs, watch = slowing(Unlike(), torch.randn(8, 8), watch=Even(), share=share)
    assert {cost.forward for name, cost in costs.items() if "softmax" in name} == {SHORT}
    assert watch.waits == 3  # the first run warms up
