"""Checkpoints: a run that was stopped goes on as if it had not been, on any number of devices."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, MultiStepLR, OneCycleLR

import fxpipe
from fxpipe.runtime.backend import Backend
from tests.helpers.checkpoints import FORMS, PLAIN, Form, Left, make, run, same
from tests.helpers.overlapping import ADAMW, OPTIMIZERS, SGD
from tests.helpers.profiles import deep
from tests.oracles.delayed_loop import MSE, Batch

pytestmark = pytest.mark.smoke


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def stopped_and_resumed(
    made: Callable[[], nn.Module],
    data: list[Batch],
    stop: int,
    path: Path,
    devices: tuple[int, int],
    options: dict[str, Any],
) -> tuple[Left, Left, Left]:
    """What a run leaves, and what fresh pipes leave that go on from the middle of it, one from a
    file and one from a folder."""
    with fxpipe.compile(made(), devices[0], loss=MSE, **options) as pipe:
        torch.manual_seed(1)
        losses = run(pipe, data[:stop])
        pipe.checkpoint(path / "file")
        pipe.save(path / "folder")
        whole = Left.by(pipe, losses + run(pipe, data[stop:]))

    def resumed(go_on: Callable[[fxpipe.Pipeline], Any]) -> Left:
        torch.manual_seed(7)
        other = made()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.normal_()
        with fxpipe.compile(other, devices[1], loss=MSE, **options) as pipe:
            go_on(pipe)
            assert pipe.batches == stop
            return Left.by(pipe, losses + run(pipe, data[stop:]))

    file = resumed(lambda pipe: pipe.restore(path / "file"))
    return whole, file, resumed(lambda pipe: pipe.load(path / "folder"))


CASES = [
    ("mlp", (2, 3), 4, {**PLAIN, "optimizer": ADAMW}),
    ("mlp", (3, 2), 1, {**PLAIN, "optimizer": SGD}),
    ("mlp", (2, 3), 5, {**PLAIN, "optimizer": OPTIMIZERS["groups"]}),
    ("mlp", (3, 2), 3, {**PLAIN, "optimizer": OPTIMIZERS["own"]}),
    ("mlp", (2, 2), 3, {**PLAIN, "optimizer": OPTIMIZERS["fused"]}),
    ("mlp", (3, 3), 5, {"microbatches": 1, "schedule": "pipedream", "partition": ["1", "3"]}),
    ("mlp", (3, 3), 5, {"microbatches": 3, "schedule": "pipedream", "partition": ["1", "3"]}),
    ("mlp", (2, 3), 3, {"microbatches": 4, "schedule": "1f1b"}),
    ("unet", (2, 1), 3, {"microbatches": 4, "schedule": "gpipe"}),
    *deep(
        ("mlp", (3, 3), 4, {**PLAIN, "optimizer": SGD}),
        ("mlp", (3, 3), 5, {"microbatches": 1, "schedule": "1f1b-async"}),
    ),
]


@pytest.mark.parametrize(("case", "devices", "stop", "options"), CASES)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    case: str, devices: tuple[int, int], stop: int, options: dict[str, Any], tmp_path: Path
) -> None:
    data = make(case, 7, 5)[1]
    options = {"optimizer": ADAMW, **options}
    made = stopped_and_resumed(lambda: make(case, 0, 1)[0], data, stop, tmp_path, devices, options)
    made[1].assert_same(made[0])
    made[2].assert_same(made[0])


@pytest.mark.parametrize("schedule", ["2bw", *deep("1f1b")])
def test_random_masks_go_on_where_they_were(schedule: str, tmp_path: Path) -> None:
    data = make("mlp", 6, 6)[1]

    def model() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Tanh()) for _ in range(5)]
        torch.manual_seed(2)
        return nn.Sequential(*blocks).double()

    options = {"microbatches": 3, "schedule": schedule, "optimizer": SGD}
    made = stopped_and_resumed(model, data, 3, tmp_path, (2, 3), options)
    made[1].assert_same(made[0])
    made[2].assert_same(made[0])


def test_restoring_rewinds_a_pipe_that_has_gone_on(tmp_path: Path) -> None:
    model, data = make("mlp", 6, 4)
    options: dict[str, Any] = {**PLAIN, "optimizer": SGD}
    with fxpipe.compile(model, 3, loss=MSE, **options) as pipe:
        run(pipe, data[:3])
        pipe.checkpoint(tmp_path / "run")
        first = Left.by(pipe, run(pipe, data[3:]))
        run(pipe, data[:2])
        pipe.restore(tmp_path / "run")
        second = Left.by(pipe, run(pipe, data[3:]))
    second.assert_same(first)


def test_a_checkpoint_of_a_restored_pipe_is_the_same(tmp_path: Path) -> None:
    model, data = make("mlp", 4, 4)
    options: dict[str, Any] = {**PLAIN, "optimizer": ADAMW}
    with fxpipe.compile(model, 3, loss=MSE, **options) as pipe:
        run(pipe, data)
        pipe.checkpoint(tmp_path / "one")
        pipe.restore(tmp_path / "one")
        pipe.checkpoint(tmp_path / "two")
    with fxpipe.compile(make("mlp", 0, 1)[0], 2, loss=MSE, **options) as pipe:
        pipe.restore(tmp_path / "two")
        pipe.checkpoint(tmp_path / "three")
    one = torch.load(tmp_path / "one")
    for name in ("two", "three"):
        assert same(torch.load(tmp_path / name), one)
    newest, older = one["parameters"]["0.0.weight"], one["history"]["older"][3]["0.0.weight"]
    assert not torch.equal(newest, older)


def test_a_parameter_changed_after_the_restore_is_the_only_version(tmp_path: Path) -> None:
    model, data = make("mlp", 6, 4)
    options: dict[str, Any] = {**PLAIN, "optimizer": SGD}

    def halve(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    with fxpipe.compile(model, 2, loss=MSE, **options) as pipe:
        run(pipe, data[:3])
        pipe.checkpoint(tmp_path / "run")
        halve(model)
        first = Left.by(pipe, run(pipe, data[3:]))
    other = make("mlp", 0, 1)[0]
    with fxpipe.compile(other, 2, loss=MSE, **options) as pipe:
        pipe.restore(tmp_path / "run")
        halve(other)
        Left.by(pipe, run(pipe, data[3:])).assert_same(first)


def test_gradients_that_are_not_stepped_yet_are_kept_without_an_optimizer(
    form: Form, tmp_path: Path
) -> None:
    (x, y), (u, v) = make("mlp", 2, 4)[1]
    options: dict[str, Any] = {"microbatches": 2, "loss": MSE}
    whole, model, other = (make("mlp", 0, 1)[0] for _ in range(3))
    with fxpipe.compile(whole, 2, **options) as pipe:
        run(pipe, [(x, y), (u, v)])
    with fxpipe.compile(model, 2, **options) as pipe:
        run(pipe, [(x, y)])
        form.write(pipe, tmp_path / "run")
    with fxpipe.compile(other, 3, **options) as pipe:
        form.read(pipe, tmp_path / "run")
        run(pipe, [(u, v)])
        assert pipe.batches == 2
    for a, b in zip(whole.parameters(), other.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a.grad, b.grad)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "exponential": lambda o: ExponentialLR(o, 0.8),
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=9),  # sets the rate when it is made
    "steps": lambda o: MultiStepLR(o, [2, 5], 0.5),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_learning_rate_schedulers_comes_back_as_what_was_added(
    name: str, tmp_path: Path
) -> None:
    data = make("mlp", 6, 4)[1]
    options: dict[str, Any] = {**PLAIN, "optimizer": OPTIMIZERS["groups"]}

    def prepared(pipe: fxpipe.Pipeline) -> list[LRScheduler]:
        pipe.prepare(data[0][0], target=data[0][1])
        return [SCHEDULERS[name](pipe.optimizer)]

    def scheduled(
        pipe: fxpipe.Pipeline, schedulers: list[LRScheduler], data: list[Batch]
    ) -> list[float]:
        losses = []
        for x, y in data:
            losses.append(float(pipe.step(x, target=y)))
            for each in schedulers:
                each.step()
        return losses

    with fxpipe.compile(make("mlp", 0, 1)[0], 2, loss=MSE, **options) as pipe:
        schedulers = prepared(pipe)
        losses = scheduled(pipe, schedulers, data[:4])
        pipe.checkpoint(tmp_path / "run", extra={"lr": schedulers[0].state_dict(), "epoch": 3})
        whole = Left.by(pipe, losses + scheduled(pipe, schedulers, data[4:]))
    with fxpipe.compile(make("mlp", 0, 1)[0], 3, loss=MSE, **options) as pipe:
        schedulers = prepared(pipe)
        extra = pipe.restore(tmp_path / "run")
        assert extra["epoch"] == 3
        for each in schedulers:
            each.load_state_dict(extra["lr"])
        losses = losses + scheduled(pipe, schedulers, data[4:])
        Left.by(pipe, losses).assert_same(whole)


def test_what_was_added_comes_back_as_it_was(form: Form, tmp_path: Path) -> None:
    extra = {
        "python": random.getstate(),
        "best": -float("inf"),
        3: [None, True, {"weights": torch.arange(3), (1, "a"): 2**70}],
    }
    with fxpipe.compile(make("mlp", 0, 1)[0], 2, loss=MSE, **PLAIN, optimizer=ADAMW) as pipe:
        form.write(pipe, tmp_path / "none")
        assert form.read(pipe, tmp_path / "none") is None
        form.write(pipe, tmp_path / "run", extra=extra)
        found = form.read(pipe, tmp_path / "run")
        with pytest.raises(fxpipe.CheckpointError, match="extra/seen is a set, which a checkpoint"):
            form.write(pipe, tmp_path / "run", extra={"seen": {1, 2}})
        assert form.read(pipe, tmp_path / "run").keys() == extra.keys()
    assert torch.equal(found[3][2].pop("weights"), torch.arange(3))
    del extra[3][2]["weights"]  # type: ignore[index]
    assert found == extra
    random.setstate(found["python"])


def test_the_generators_of_devices_go_on_where_they_were(
    form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU device has none of its own: here it is given one, under the name of another device."""
    own = torch.Generator().manual_seed(3)
    monkeypatch.setattr(Backend, "generators", lambda self: {"cuda:0": own})
    with fxpipe.compile(make("mlp", 0, 1)[0], 2, loss=MSE, **PLAIN, optimizer=ADAMW) as pipe:
        torch.rand(5, generator=own)
        form.write(pipe, tmp_path / "run")
        expected = torch.rand(5, generator=own)
        form.read(pipe, tmp_path / "run")
        assert torch.equal(torch.rand(5, generator=own), expected)


@pytest.mark.parametrize("schedule", ["2bw", *deep("1f1b")])
def test_clipping_and_the_scale_of_losses_go_on(schedule: str, form: Form, tmp_path: Path) -> None:
    data = make("mlp", 8, 4)[1]
    data[1][0][0] = torch.inf  # this batch is skipped, and the scale falls
    options: dict[str, Any] = {
        **PLAIN,
        "schedule": schedule,
        "optimizer": SGD,
        "clip_norm": 0.05,
    }

    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=3e3, growth_factor=1.7, growth_interval=3)

    def model() -> nn.Module:
        return make("mlp", 0, 1)[0]

    first, second = scaler(), scaler()
    with fxpipe.compile(model(), 2, loss=MSE, scaler=first, **options) as pipe:
        run(pipe, data[:4])
        form.write(pipe, tmp_path / "run")
        scale = first.get_scale()
        whole, norm = Left.by(pipe, run(pipe, data[4:])), pipe.grad_norm
    assert scale == 1500
    with fxpipe.compile(model(), 3, loss=MSE, scaler=second, **options) as pipe:
        form.read(pipe, tmp_path / "run")
        assert second.get_scale() == scale
        Left.by(pipe, run(pipe, data[4:])).assert_same(whole)
        assert pipe.grad_norm == norm
    assert second.get_scale() == first.get_scale() > scale


def test_tied_parameters_and_other_kinds_of_tensors_are_kept(form: Form, tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.last.weight = self.first.weight
            self.register_buffer("turn", torch.tensor([1 + 2j, 3j]), persistent=False)
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(torch.tanh(self.first(x))) * self.scale.float()
            return out

    data = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(5)]
    options: dict[str, Any] = {**PLAIN, "optimizer": ADAMW}
    with fxpipe.compile(Model(), 1, loss=MSE, **options) as pipe:
        run(pipe, data[:3])
        form.write(pipe, tmp_path / "run")
        whole = Left.by(pipe, run(pipe, data[3:]))
    model = Model()
    model.get_buffer("turn").zero_()
    with fxpipe.compile(model, 2, loss=MSE, **options) as pipe:
        form.read(pipe, tmp_path / "run")
        assert model.get_buffer("turn").tolist() == [1 + 2j, 3j]
        Left.by(pipe, run(pipe, data[3:])).assert_same(whole)
