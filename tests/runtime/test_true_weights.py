"""Weights predicted by momentum: batches read predictions, and users see the true weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fxpipe
from examples.predicted_weights import predicting
from fxpipe.errors import InputError
from fxpipe.pipeline import Pipeline
from fxpipe.runtime.group import Group
from fxpipe.runtime.weights.optimizer import GivenOptimizer
from fxpipe.runtime.weights.optimizers import Optimizers
from tests.oracles import loop
from tests.oracles.delayed_loop import MSE, Factory

MICROBATCHES = 4

BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "spectrain": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "xpipe": (torch.optim.Adam, {"lr": 1e-2}),
}

Weights = dict[str, Tensor]


def made(batches: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    x = torch.randn(batches, 2, 2 * MICROBATCHES, 6, dtype=torch.float64)
    return nn.Sequential(*layers).double(), [(x, y) for x, y in x]


def of(kind: str, steps: int = 1) -> Factory:
    base, options = BASES[kind]
    return lambda parameters: predicting(base, steps)(parameters, **options)


def compiled(model: nn.Module, optimizer: Any, schedule: str = "2bw", **options: Any) -> Pipeline:
    return fxpipe.compile(
        model,
        ["cpu"] * 2,
        schedule=schedule,
        microbatches=MICROBATCHES,
        partition=["2"],
        loss=MSE,
        optimizer=optimizer,
        **options,
    )


def values(model: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Predicted:
    """The loop: batch t reads ŵ(t − 1) = w + steps · (w − the w before) of its update t − 1, and
    the update is of w(t)."""

    def __init__(self, model: nn.Module, kind: str, steps: int = 1, delay: int = 1) -> None:
        base, options = BASES[kind]
        self.model, self.steps, self.delay = copy.deepcopy(model), steps, delay
        self.optimizer = base(self.model.parameters(), **options)
        self.true = [values(self.model)]
        self.predicted = [self.true[0]]
        self.oldest = 0

    def step(self, x: Tensor, y: Tensor) -> None:
        self.hold(self.predicted[max(len(self.predicted) - 1 - self.delay, self.oldest)])
        self.optimizer.zero_grad()
        loop.train(self.model, MICROBATCHES, x, loss=MSE, target=y)
        self.hold(before := self.true[-1])
        self.optimizer.step()
        self.true.append(now := values(self.model))
        self.predicted.append({n: w + self.steps * (w - before[n]) for n, w in now.items()})

    def load(self, weights: Weights) -> None:
        """Change weights; no batch reads older ones from now on."""
        self.true[-1] = self.true[-1] | weights
        self.predicted[-1] = self.predicted[-1] | weights
        self.oldest = len(self.predicted) - 1

    def hold(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(weights[name])


def same(found: Weights, expected: Weights) -> bool:
    return dict.fromkeys(expected, True) == {n: t.equal(expected[n]) for n, t in found.items()}


@pytest.mark.parametrize("kind", BASES)
def test_batches_read_predictions_and_the_state_dict_has_the_true_weights(kind: str) -> None:
    model, data = made(6)
    expected = Predicted(model, kind)
    with compiled(model, of(kind)) as pipe:
        for x, y in data:
            pipe.step(x, target=y)
            expected.step(x, y)
        assert same(pipe.state_dict(), expected.true[-1])
        assert same(dict(pipe.named_parameters()), expected.predicted[-1])
        assert same(copy.deepcopy(pipe).state_dict(), expected.true[-1])


def test_a_prediction_goes_as_many_steps_ahead_as_told() -> None:
    model, data = made(5)
    expected = Predicted(model, "spectrain", steps=3, delay=0)
    with compiled(model, of("spectrain", 3), "1f1b") as pipe:
        for x, y in data:
            pipe.step(x, target=y)
            expected.step(x, y)
        assert same(pipe.state_dict(), expected.true[-1])


def test_momentum_predicts_what_training_comes_to() -> None:
    model, data = made(12)
    expected = Predicted(model, "spectrain")
    for _ in data:
        expected.step(*data[0])

    def apart(read: list[Weights]) -> float:
        pairs = zip(read[2:-1], expected.true[3:], strict=True)
        return sum(float((a[n] - b[n]).norm()) for a, b in pairs for n in a)

    assert apart(expected.predicted) < apart(expected.true)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_evaluation_is_by_the_true_weights_and_leaves_training_as_it_is(schedule: str) -> None:
    model, data = made(6)
    expected = Predicted(model, "xpipe", delay=schedule == "2bw")
    with compiled(model, of("xpipe"), schedule) as pipe:
        for x, y in data:
            pipe.step(x, target=y)
            expected.step(x, y)
            expected.hold(expected.true[-1])
            with torch.no_grad():
                alone = torch.cat([expected.model(part) for part in x.chunk(MICROBATCHES)])
                assert torch.equal(pipe(x), alone)
            pipe.eval()
            assert torch.equal(pipe(x), alone)
            pipe.train()
        assert same(pipe.state_dict(), expected.true[-1])


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_what_is_loaded_is_the_true_weights_and_what_the_next_batch_reads(schedule: str) -> None:
    model, data = made(6)
    loaded = {name: value + 0.5 for name, value in values(model).items()}
    expected = Predicted(model, "spectrain", delay=schedule == "2bw")
    with compiled(model, of("spectrain"), schedule) as pipe:
        for x, y in data[:3]:
            pipe.step(x, target=y)
            expected.step(x, y)
        part = {name: value for name, value in loaded.items() if name.startswith("0")}
        pipe.load_state_dict(part, strict=False)
        expected.load(part)
        assert same(pipe.state_dict(), expected.true[-1])
        for x, y in data[3:]:
            pipe.step(x, target=y)
            expected.step(x, y)
        assert same(pipe.state_dict(), expected.true[-1])


def in_file(path: Path) -> tuple[Callable[[Pipeline], None], Callable[[Pipeline], Any]]:
    return lambda pipe: pipe.checkpoint(path), lambda pipe: pipe.restore(path)


def in_folder(path: Path) -> tuple[Callable[[Pipeline], None], Callable[[Pipeline], Any]]:
    return lambda pipe: pipe.save(path), lambda pipe: pipe.load(path)


@pytest.mark.parametrize("form", [in_file, in_folder])
def test_a_checkpoint_goes_on_from_predictions(form: Any, tmp_path: Path) -> None:
    write, read = form(tmp_path / "run")
    model, data = made(6)
    again = copy.deepcopy(model)
    with compiled(model, of("xpipe")) as pipe:
        for number, (x, y) in enumerate(data):
            if number == 3:
                write(pipe)
                middle = {n: t.clone() for n, t in pipe.state_dict().items()}
            pipe.step(x, target=y)
        expected = pipe.state_dict()
    with compiled(again, of("xpipe"), "2bw") as pipe:
        read(pipe)
        assert same(pipe.state_dict(), middle)
        for x, y in data[3:]:
            pipe.step(x, target=y)
        assert same(pipe.state_dict(), expected)
    if form is in_folder:
        dcp_to_torch_save(tmp_path / "run", tmp_path / "run.pt")
        assert same(torch.load(tmp_path / "run.pt")["model"], middle)


def test_several_optimizers_tell_their_true_weights() -> None:
    model, data = made(4)
    expected = Predicted(model, "spectrain", delay=0)
    base, options = BASES["spectrain"]
    parameters = [*model.parameters()]
    each = [of("spectrain")(parameters[:4]), base(parameters[4:], **options)]
    with compiled(model, each, "1f1b") as pipe:
        pipe.step(*data[0][:1], target=data[0][1])
        expected.step(*data[0])
        assert same(pipe.state_dict(), expected.true[-1])
        held = [p.equal(expected.true[-1][n]) for n, p in pipe.named_parameters()]
        assert held == [False] * 4 + [True] * 4


class Wrong(torch.optim.SGD):
    def true_weights(self) -> dict[Tensor, Tensor]:
        return {p: p.flatten().float() for group in self.param_groups for p in group["params"]}


def test_a_true_weight_that_is_no_value_of_its_parameter_is_refused_by_name() -> None:
    model, data = made(1)
    with compiled(model, Wrong(model.parameters(), lr=0.1), "1f1b") as pipe:
        pipe.step(data[0][0], target=data[0][1])
        before = values(model)
        with pytest.raises(InputError, match=r"returns a tensor \(\[36\], torch.float32, cpu\)"):
            pipe.state_dict()
        assert same(dict(pipe.named_parameters()), before)


class Owner:
    """Stands for an engine."""

    def owns(self, stage: int) -> bool:
        return True

    def flush(self) -> None: ...


def test_replicas_that_shard_an_optimizer_with_true_weights_refuse_it() -> None:
    model, _ = made(1)
    given = GivenOptimizer(of("xpipe")(model.parameters()), model)
    pipe = Owner()
    with pytest.raises(InputError, match=r"PredictingAdam has true_weights\(\).*shard_optimizer"):
        Optimizers(model, given, pipe.owns, pipe.flush, Group())
