"""Plans for models: what a plan predicts is what its pipe does."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import fxpipe
import fxpipe.extensions.planner.plan_training
from fxpipe.compiler import placement
from fxpipe.extensions.planner.cluster import Cluster, Level
from fxpipe.extensions.simulator import Link
from tests.helpers.works import measured_alike
from tests.oracles import loop
from tests.oracles.loop import train

planning: Any = sys.modules["fxpipe.extensions.planner.plan_training"]


class Branching(nn.Linear):
    """It cannot be traced, as it branches on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh() if x.sum() > 0 else super().forward(x)


def test_a_model_with_leaf_modules_is_planned_with_whole_backwards() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Branching(8, 8), nn.Linear(8, 8))
    alone = copy.deepcopy(model)
    x, y = torch.randn(8, 8), torch.zeros(8, 8)
    given: dict[str, Any] = {"example": ((x,), {"target": y}), "loss": mse_loss, "keep": 100}
    plan = fxpipe.plan_training(model, 2, 8, **given)
    chosen = next(each for each in plan.choices if each.stages == 2)
    with chosen.compile(["cpu"] * 2) as pipe:
        pipe.step(x, target=y)
        train(alone, pipe.schedule.microbatches, x, loss=mse_loss, target=y)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    with pytest.raises(fxpipe.InputError, match="'zb-h1' has backwards in halves, and these"):
        fxpipe.plan_training(model, 2, 8, schedules=["zb-h1"], **given)


class Sized(nn.Linear):
    """What it computes has other names for micro-batches of another size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 5:
            return super().forward(x).tanh()
        return torch.addmm(self.bias, x, self.weight.t()).sigmoid()


def test_a_model_with_another_graph_for_another_size_is_planned() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 16), torch.zeros(8, 16)
    cluster = Cluster((Level("host", 2, Link(bandwidth=10e9)),), memory=2**30)
    example = (x,), {"target": y}
    model = nn.Sequential(Sized(16, 16), Sized(16, 16))
    plan = fxpipe.plan_training(model, cluster, 8, example=example, loss=mse_loss, keep=100)
    planned = [each.predicted.candidate for each in plan.choices if each.stages == 2]
    assert any(each.microbatches > 1 for each in planned)


def test_sizes_of_micro_batches_that_a_model_refuses_are_left_out_of_its_plan() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 16), torch.zeros(4, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    cluster = Cluster((Level("host", 2, Link(bandwidth=10e9)),))
    example = (x,), {"target": y}
    plan = fxpipe.plan_training(model, cluster, 4, example=example, loss=mse_loss, keep=100)
    assert {each.samples for each in plan.choices} == {2}
    with pytest.raises(fxpipe.InputError, match="Expected more than 1 value per channel"):
        fxpipe.plan_training(model, cluster, 2, example=example, loss=mse_loss)


@pytest.mark.smoke
def test_a_chosen_plan_compiles_and_trains_like_the_loop() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh())])
    alone = copy.deepcopy(model)
    x, y = torch.randn(8, 16), torch.zeros(8, 16)
    plan = fxpipe.plan_training(
        model,
        Cluster((Level("host", 2, Link(bandwidth=10e9)),), memory=2**30),
        8,
        example=((x[:4],), {"target": y[:4]}),
        loss=mse_loss,
        keep=100,
    )
    assert plan.best.throughput == max(each.throughput for each in plan.choices)
    assert "× stages" in str(plan)
    chosen = next(each for each in plan.choices if each.stages == 2)
    with chosen.compile() as pipe:
        pipe.step(x, target=y)
        assert pipe.schedule.microbatches == chosen.predicted.candidate.microbatches
        assert pipe.schedule.name == chosen.predicted.candidate.recipe.name
        train(alone, pipe.schedule.microbatches, x, loss=mse_loss, target=y)
        for ours, theirs in zip(pipe.parameters(), alone.parameters(), strict=True):
            assert ours.grad is not None and torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    beside = next(each for each in plan.choices if each.replicas == 2)
    with pytest.raises(fxpipe.InputError, match="init_device_mesh"):
        beside.compile()
    with pytest.raises(fxpipe.InputError, match="schedule is what plan_training chooses"):
        fxpipe.plan_training(model, 2, 8, example=(x,), schedule="1f1b")
    with pytest.raises(fxpipe.InputError, match="keep is 0; give a whole number of at least 1"):
        fxpipe.plan_training(model, 2, 8, example=(x,), keep=0)
    sizes: Any
    for sizes in ((0, 2), (2, 1.5), "28"):
        with pytest.raises(fxpipe.InputError, match=r"sizes is .*; give "):
            fxpipe.plan_training(model, 2, 8, example=(x,), sizes=sizes)
    flags: Any
    for flags in ({"stale": "x"}, {"recompute": "always"}, {"offload": 1}):
        with pytest.raises(fxpipe.InputError, match="give True or False"):
            fxpipe.plan_training(model, 2, 8, example=(x,), **flags)
    schedules: Any
    for schedules in ([], "1f1b", [None]):
        with pytest.raises(fxpipe.InputError, match=r"schedules is .*; give a list of names"):
            fxpipe.plan_training(model, 2, 8, example=(x,), schedules=schedules)


@pytest.mark.parametrize(("rate", "cap", "does"), [(1e15, 17.5, "O"), (1.0, 28, "R")])
def test_a_plan_within_memory_predicts_what_its_pipe_holds_and_trains_like_the_loop(
    rate: float, cap: float, does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages store what they keep where that is quick, and else recompute."""
    monkeypatch.setattr(placement, "_measured", measured_alike)
    monkeypatch.setattr(planning, "away_rates", lambda place: (rate, rate))
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh())])
    x, y = torch.randn(128, 16), torch.zeros(128, 16)
    given: Any = {"loss": mse_loss, "optimizer": torch.optim.SGD, "schedules": ["gpipe"]}
    given |= {"batch": 128, "example": ((x[:16],), {"target": y[:16]}), "keep": 100}
    cluster = Cluster((Level("host", 2),))
    free = fxpipe.plan_training(model, cluster, **given)
    most = cap * 1024
    plan = fxpipe.plan_training(model, replace(cluster, memory=most), **given)
    asked = fxpipe.plan_training(model, replace(cluster, memory=most), **given, offload=False)
    assert plan.best.fits and not any(each.predicted.candidate.offload for each in asked.choices)
    first, chosen = (next(c for c in found.choices if c.stages == 2) for found in (free, plan))
    for each in (first, chosen):
        alone = copy.deepcopy(model)
        optimizer = torch.optim.SGD(alone.parameters())
        with each.compile(example=((x,), {"target": y})) as pipe:
            held = tuple(memory.peak for memory in pipe.simulate().memory)
            assert held == each.predicted.peaks
            pipe.step(x, target=y)
            kinds = pipe.schedule.kinds & {"O", "R"}
            assert not kinds if each is first else does in kinds
            train(alone, pipe.schedule.microbatches, x, loss=mse_loss, target=y)
            optimizer.step()
            for ours, theirs in zip(pipe.parameters(), alone.parameters(), strict=True):
                assert torch.equal(ours, theirs)


def test_devices_of_this_machine_stand_for_a_cluster_of_them() -> None:
    """CPU devices hand over tensors in the memory that they share: nothing is sent."""
    model, x = nn.Linear(2, 2), torch.ones(4, 2)
    plan = fxpipe.plan_training(
        model, 2, 8, example=((x,), {"target": x}), loss=mse_loss, sizes=(1,), schedules=["1f1b"]
    )
    assert plan.cluster == Cluster((Level("host", 2),)) == Cluster.measured(["cpu", "cpu"])
    with pytest.raises(fxpipe.InputError, match="devices is 'cuda'"):
        Cluster.measured("cuda")
