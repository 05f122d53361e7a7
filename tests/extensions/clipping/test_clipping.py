"""Clipping by the norm of all stages' gradients, and skipping what is not finite."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.extensions.clipping.clipping import Clipping
from fxpipe.extensions.clipping.opcodes import add_clip, norms_of
from fxpipe.ir.recipe import RECIPES, find_recipe
from tests.helpers.overlapping import LOSSES, SGD, compiled, make
from tests.helpers.profiles import deep
from tests.oracles import loop
from tests.oracles.delayed_loop import DelayedLoop

LIMIT = 0.05


class ClippedLoop(DelayedLoop):
    """The delayed loop with torch's own clipping before each step.

    Attributes:
        norms: batch → the norm before clipping.
    """

    norms: list[float]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.norms = []
        step = self.optimizer.step

        def clipped() -> None:
            parameters = list(self.model.parameters())
            self.norms.append(float(nn.utils.clip_grad_norm_(parameters, LIMIT)))
            step()

        self.optimizer.step = clipped  # type: ignore[method-assign, assignment]


def test_without_a_scaler_clipping_waits_for_no_device() -> None:
    clipping = Clipping(LIMIT, None)
    gradients = [torch.ones(3, device="meta"), None]  # to read what has no data is an error
    clipping.begin(0)
    clipping.clip(0, gradients, norms_of(gradients))
    clipping.settle(1)
    with pytest.raises(RuntimeError, match="meta"):
        _ = clipping.norm()


@pytest.mark.parametrize(
    ("schedule", "devices", "microbatches", "case", "scale"),
    [
        ("1f1b", 3, 3, "mlp", None),
        *deep(("zb-v", 2, 4, "mlp", None), ("1f1b-async", 4, 2, "mlp", None)),
        ("zb-v", 2, 4, "mlp", 1024.0),
        ("2bw", 3, 4, "mlp", 1024.0),
        *deep(("1f1b-async", 3, 1, "mlp", None)),
        *deep(("1f1b", 3, 3, "unet", None), ("2bw", 2, 2, "transformer", None)),
    ],
)
def test_gradients_are_clipped_by_the_norm_of_all_stages(
    schedule: str, devices: int, microbatches: int, case: str, scale: float | None
) -> None:
    """With a scaler by that of the gradients without its scale."""
    model, data = make(case, 8, 5)
    delay = max(add_clip(find_recipe(schedule)(devices, microbatches)).delays)
    expected = ClippedLoop.beside(model, SGD, microbatches, loss=LOSSES[case], delay=delay)
    options: dict[str, Any] = {"schedule": schedule, "loss": LOSSES[case], "clip_norm": LIMIT}
    if scale is not None:
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=scale)
    with compiled(model, devices, microbatches, **options) as pipe:
        assert pipe.grad_norm is None
        for x, y in data:
            made, right = pipe.step(x, target=y), expected.step(x, y)
            torch.testing.assert_close(made, right, rtol=1e-12, atol=1e-12)
        pipe.flush()
        assert pipe.grad_norm == pytest.approx(expected.norms[-1], rel=1e-12)
        assert min(expected.norms) > LIMIT
        assert "C" in pipe.schedule.kinds
        assert fxpipe.Schedule.parse(str(pipe.schedule)) == pipe.schedule
        assert fxpipe.Program.parse(str(pipe.program)) == pipe.program
        assert pipe.program.verify() is pipe.program
    expected.assert_same(model, 1e-12)


class Unordered(nn.Module):
    """Registers its layers in another order than it calls them, and one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        for index in (3, 1, 0, 2):
            layer = nn.Linear(16, 16)
            layer.weight.requires_grad_(index != 1)
            setattr(self, f"layer{index}", layer)
        self.unused = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for index, norm in enumerate(self.norms):
            x = norm(getattr(self, f"layer{index}")(x)).tanh()
        return x


def test_norms_are_added_in_the_order_of_the_models_parameters() -> None:
    """To the bit those of a loop, in whatever order the stages have the parameters."""
    torch.manual_seed(0)
    model = Unordered()
    expected = ClippedLoop.beside(model, SGD, 2, delay=0)
    options: dict[str, Any] = {"partition": ["layer2"]}
    with compiled(model, 2, 2, schedule="1f1b", clip_norm=LIMIT, **options) as pipe:
        for _ in range(8):
            x, y = torch.randn(2, 4, 16)
            pipe.step(x, target=y)
            expected.step(x, y)
            assert pipe.grad_norm == expected.norms[-1]
    expected.assert_same(model)


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"inference", "pipedream"}))
def test_every_schedule_of_the_library_can_clip(name: str) -> None:
    for devices, microbatches in ((1, 1), (2, 3), (4, 4)):
        schedule = add_clip(find_recipe(name)(devices, microbatches))
        assert schedule.verify() is schedule
        assert sum(task.kind == "C" for row in schedule.rows for task in row) == schedule.stages


def test_a_stage_that_does_not_clip_with_the_others_is_refused() -> None:
    schedule = add_clip(find_recipe("1f1b")(2, 2))
    rows = (schedule.rows[0], tuple(task for task in schedule.rows[1] if task.kind != "C"))
    with pytest.raises(fxpipe.VerificationError, match="stage 1 has no clip; clip every stage"):
        replace(schedule, rows=rows).verify()


def test_a_clip_before_another_stages_gradients_is_refused() -> None:
    text = """
    schedule mine stages=2 microbatches=1 delay=0
    place 0 1
    0: F0@0 F0@1 B0@1 C@1 B0@0 C@0 U@0 U@1
    """
    with pytest.raises(fxpipe.VerificationError, match="C@1: it comes before B0@0"):
        fxpipe.Schedule.parse(text).verify()


@pytest.mark.parametrize(("microbatches", "enough"), [(1, "2,2,2"), (3, "1,1,1")])
def test_stages_with_different_delays_cannot_clip_together(microbatches: int, enough: str) -> None:
    model, data = make("mlp", 1, 4)
    with (
        compiled(model, 3, microbatches, schedule="pipedream", clip_norm=1.0) as pipe,
        pytest.raises(fxpipe.VerificationError, match=f"use delay={enough}, the smallest"),
    ):
        pipe.step(data[0][0], target=data[0][1])


class Overflowing(nn.Module):
    """Gradients that are not finite where an input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).tanh())
        return out


@pytest.mark.parametrize(("schedule", "late"), [("1f1b", 0), ("2bw", 1)])
def test_a_batch_that_is_not_finite_updates_no_stage_and_lowers_the_scale(
    schedule: str, late: int
) -> None:
    torch.manual_seed(0)
    model = Overflowing().double()
    bad = 3
    data = [(torch.randn(4, 4).double(), torch.randn(4, 4).double()) for _ in range(9)]
    data[bad][1].fill_(float("inf"))
    expected = DelayedLoop.beside(model, SGD, 2, delay=late)
    trained = list(expected.model.parameters())
    step = expected.optimizer.step

    def skipping() -> None:
        if all(bool(p.grad.isfinite().all()) for p in trained if p.grad is not None):
            step()

    expected.optimizer.step = skipping  # type: ignore[method-assign, assignment]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    with compiled(model, 2, 2, schedule=schedule, scaler=scaler) as pipe:
        for x, y in data:
            pipe.step(x, target=y)
            expected.step(x, y)
        pipe.flush()
    # halved once, doubled once after four batches that were finite
    assert scaler.get_scale() == 1024.0
    expected.assert_same(model, 1e-12)


class OwnLoss(nn.Module):
    """Returns its loss beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        output = self.layers(x)
        return {"loss": nn.functional.mse_loss(output, y), "output": output, "mean": output.mean()}


@pytest.mark.parametrize(
    ("scale", "limit"),
    [(2.0**10, 0.5), (1000.0, None), *deep((2.0**10, None), (1000.0, 0.5))],
)
def test_a_scaler_is_used_as_in_a_plain_loop(scale: float, limit: float | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
    alone = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone)]
    ours, theirs = (
        torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3) for _ in range(2)
    )
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        microbatches=2,
        loss=mse_loss,
        partition=["2"],
        optimizer=optimizers[0],
        scaler=ours,
        clip_norm=limit,
    ) as pipe:
        for number in range(9):
            x, y = torch.randn(8, 8), torch.randn(8, 4)
            if number in (2, 4):
                x *= math.inf
            pipe.step(x, target=y)
            optimizers[1].zero_grad()
            for part, target in loop.split((x, y), 8, 2):
                theirs.scale(mse_loss(alone(part), target) * 0.5).backward()
            theirs.unscale_(optimizers[1])
            if limit is not None:
                nn.utils.clip_grad_norm_(alone.parameters(), limit)
            theirs.step(optimizers[1])
            theirs.update()
            assert ours.state_dict() == theirs.state_dict()
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(own, other)


def test_a_scaler_that_is_disabled_leaves_no_batch_out() -> None:
    model = nn.Linear(4, 4)
    with fxpipe.compile(
        model,
        1,
        microbatches=2,
        loss=mse_loss,
        optimizer=SGD,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
    ) as pipe:
        pipe.step(torch.full((4, 4), math.inf), target=torch.zeros(4, 4))
    assert model.weight.isnan().any()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "2bw", "1f1b-async"])
def test_a_scale_shows_in_no_loss_output_or_norm(schedule: str) -> None:
    torch.manual_seed(0)
    model = OwnLoss().double()
    alone = copy.deepcopy(model)
    x, y = torch.randn(2, 5, 4).double()
    scaler = torch.amp.GradScaler("cpu", init_scale=3e4)
    with compiled(model, 2, 3, schedule=schedule, loss=None, scaler=scaler) as pipe:
        loss, output = pipe.step(x, y, return_output=True)
        pipe.flush()
        norm = pipe.grad_norm
    expected = loop.train(alone, 3, x, y)
    assert torch.equal(loss, expected.loss)
    assert torch.equal(output["loss"], expected.loss)
    assert torch.equal(output["output"], torch.cat([out["output"] for out in expected.outputs]))
    torch.testing.assert_close(output["mean"], alone(x, y)["mean"].detach())
    gradients = [p.grad for p in alone.parameters() if p.grad is not None]
    assert norm == pytest.approx(float(nn.utils.get_total_norm(gradients)), rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_scaled_loss_is_that_of_the_batch_in_every_step(schedule: str) -> None:
    model, data = make("mlp", 5, 5)
    delay = max(find_recipe(schedule)(2, 3).delays)
    expected = DelayedLoop.beside(model, SGD, 3, delay=delay)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    with compiled(model, 2, 3, schedule=schedule, scaler=scaler) as pipe:
        for x, y in data:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
    expected.assert_same(model)
    assert scaler.get_scale() > 2.0**16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0}, "clip_norm is 0; give a number above 0"),
        ({"clip_norm": "1"}, "clip_norm is '1'"),
        ({"clip_norm": float("inf")}, "clip_norm is inf"),
        ({"scaler": 2.0}, "scaler is 2.0; give a gradient scaler"),
        ({"clip_norm": 1.0, "optimizer": None}, "clip_norm is given and no optimizer"),
    ],
)
def test_wrong_limits_are_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"optimizer": SGD, **options}
    with pytest.raises(fxpipe.InputError, match=message):
        fxpipe.compile(nn.Linear(2, 2), 1, loss=nn.functional.mse_loss, **given)
