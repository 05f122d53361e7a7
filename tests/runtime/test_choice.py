"""One thread or a thread for each device: whichever is predicted to be faster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxpipe
from fxpipe.ir.plan import Plan, StageCosts
from fxpipe.ir.recipe import find_recipe
from fxpipe.runtime import choice
from fxpipe.runtime.choice import ELEMENTS, ThreadChoice, step_seconds
from tests.oracles.delayed_loop import MSE

X = torch.randn(8, 6)


def plan_of(model: nn.Module, partition: list[str], **options: Any) -> Plan:
    devices = ["cpu"] * (len(partition) + 1)
    options = {"microbatches": 4, "loss": MSE, "partition": partition, **options}
    with fxpipe.compile(model, devices, **options) as pipe:
        pipe.prepare(X, target=X)
        return pipe.plan


@pytest.fixture(scope="module")
def three() -> Plan:
    """Three stages of one layer each."""
    return plan_of(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), ["1", "2"])


def timed(plan: Plan, seconds: list[float]) -> Plan:
    """The plan with measured stages: of their time, the forward takes a third."""
    costs = [StageCosts(time / 3, 2 * time / 3) for time in seconds]
    pairs = zip(plan.stages, costs, strict=True)
    return replace(plan, stages=tuple(replace(stage, costs=cost) for stage, cost in pairs))


def operations(plan: Plan) -> list[int]:
    graphs = [[stage.forward, stage.backward] for stage in plan.stages]
    return [
        sum(n.op == "call_function" for graph in own if graph for n in graph.graph.nodes)
        for own in graphs
    ]


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 50), min_size=3, max_size=3),
    st.integers(1, 9),
    st.sampled_from([0, 1, 7]),
    st.integers(2, 4),
)
def test_times_are_those_of_micro_batches_that_follow_each_other(
    three: Plan, seconds: list[int], count: int, longer: int, processors: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "HAND_OVER", float(longer))
        patch.setattr(choice, "processors", lambda: processors)
        plan = timed(three, [*map(float, seconds)])
        one, each = step_seconds(plan, find_recipe("1f1b")(3, count))
    assert one == pytest.approx(count * sum(seconds))
    own = [t + longer * n for t, n in zip(seconds, operations(plan), strict=True)]
    free = [0.0] * 3  # stage → when it has computed the last micro-batch
    for _ in range(count):
        done = 0.0
        for stage, time in enumerate(own):
            done = free[stage] = max(done, free[stage]) + time
    assert each == pytest.approx(max(free[-1], count * sum(own) / processors))


def test_batches_that_overlap_wait_for_no_first_micro_batch(three: Plan) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "processors", lambda: 3)
        patch.setattr(choice, "HAND_OVER", 0.0)
        assert step_seconds(timed(three, [1.0, 3.0, 2.0]), find_recipe("2bw")(3, 4))[1] == 12.0


def test_inference_takes_forwards_only(three: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "HAND_OVER", 0.0)
    one, _ = step_seconds(timed(three, [3.0, 3.0, 3.0]), find_recipe("inference")(3, 4))
    assert one == pytest.approx(4 * 3 * 1.0)


@pytest.mark.parametrize(
    ("processors", "times", "count"),
    [(2, 3.0, 2), (2, 0.3, 1), (1, 3.0, 1), (1, 1e6, 1), (2, 1e6, 2)],
)
def test_a_thread_for_each_device_is_for_operations_longer_than_a_hand_over(
    processors: int, times: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(nn.Sequential(*(nn.Linear(6, 6) for _ in range(8))), ["4"])
    monkeypatch.setattr(choice, "HAND_OVER", 1e-5)
    monkeypatch.setattr(choice, "processors", lambda: processors)
    plan = timed(plan, [times * 1e-5 * n for n in operations(plan)])
    chosen = ThreadChoice(2, None).threads(plan, find_recipe("1f1b")(2, 8))
    assert chosen == count


def test_what_was_not_measured_goes_by_the_largest_tensor_of_each_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights are transposed, and multiplied: then these or the result may be larger."""
    monkeypatch.setattr(choice, "HAND_OVER", float(ELEMENTS))
    model = nn.Sequential(nn.Linear(4, 32, bias=False))
    for samples, expected in ((1, 128 + 128), (8, 128 + 256)):
        with fxpipe.compile(model, 1, microbatches=1, partition=[]) as pipe:
            pipe(torch.ones(samples, 4))
            assert pipe.plan.stages[0].costs is None
            assert step_seconds(pipe.plan, find_recipe("inference")(1, 1))[0] == expected


def test_a_module_that_is_called_has_the_operations_of_those_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Called(nn.Sequential):
        pass

    monkeypatch.setattr(choice, "HAND_OVER", 1.0)
    leaf = Called(nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Tanh()))
    plan = plan_of(nn.Sequential(leaf), [], extensions=[fxpipe.LeafModules(Called)])
    one, each = step_seconds(timed(plan, [3.0]), find_recipe("inference")(1, 1))
    assert each - one == 5 + 1  # the modules, with those that hold others, and the loss


def test_times_are_those_of_larger_micro_batches_than_were_measured(
    three: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "HAND_OVER", 2.0)
    plan, schedule = timed(three, [1.0, 2.0, 3.0]), find_recipe("1f1b")(3, 4)
    assert step_seconds(plan, schedule, 5.0) == step_seconds(
        timed(three, [5.0, 10.0, 15.0]), schedule
    )


def test_a_small_first_call_decides_nothing_for_large_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All operations take 10 microseconds in tests: so they do for one sample, and for 64 more."""
    monkeypatch.setattr(choice, "HAND_OVER", 1e-5)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))
    with fxpipe.compile(model, 2, microbatches=2, loss=MSE) as pipe, torch.no_grad():
        pipe.eval()(X[:2])
        assert pipe._calls.compiled().threads == 1
        pipe.train()
        with torch.enable_grad():
            x = torch.randn(128, 6)
            pipe.step(x, target=x)
            assert pipe._calls.compiled().threads == 2
            pipe.step(x[:2], target=x[:2])
            assert pipe._calls.compiled().threads == 1
