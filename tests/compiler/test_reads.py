"""Strings and numbers that change from step to step, in the batch or beside it, compile twice at
most, and count as in a plain loop."""

from __future__ import annotations

import copy
import logging
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.helpers.profiles import deep
from tests.oracles import loop
from tests.oracles.delayed_loop import DelayedLoop

pytestmark = pytest.mark.traces


class Net(nn.Module):
    """Reads numbers from all kinds of places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.beta = 0.5
        self.count = 1
        self.rates = [0.1]
        self.config = types.SimpleNamespace(share=0.2)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, scale: Any = 1.0, names: Any = None, **more: Any) -> Any:
        h = torch.tanh(self.first(x)) * scale
        if more.get("mode") == "wide":
            h = h * 2
        penalty = self.beta * h.square().mean() + self.rates[0] * h.mean() / self.config.share
        made: Tensor = self.last(self.drop(h * min(1.0, self.count / 4)))
        return made, penalty


class Loss(nn.Module):
    weight = 1.0

    def forward(self, output: Any, target: Tensor, factor: float = 1.0) -> Tensor:
        made, penalty = output
        value: Tensor = F.cross_entropy(made, target) * factor + self.weight * penalty
        return value


def _compiled(caplog: pytest.LogCaptureFixture) -> int:
    return sum("compiled" in r.getMessage() for r in caplog.records if r.levelno == logging.INFO)


def _trained(
    caplog: pytest.LogCaptureFixture,
    *,
    steps: int = 6,
    change: Callable[[Any, Any, int], Any] = lambda model, loss, step: None,
    batch: Callable[[int], dict[str, Any]] = lambda step: {},
    targets: Callable[[int], tuple[Any, ...]] = lambda step: (),
    **options: Any,
) -> int:
    """Train beside the plain loop, and compare all bits; returns how many steps compiled."""
    torch.manual_seed(0)
    model, loss = Net(), Loss()
    alone, loss_alone = copy.deepcopy(model), copy.deepcopy(loss)
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    devices = options.pop("devices", ["cpu", "cpu"])
    with (
        caplog.at_level(logging.INFO, "fxpipe"),
        fxpipe.compile(model, devices, microbatches=2, loss=loss, **options) as pipe,
    ):
        for step in range(steps):
            change(model, loss, step)
            change(alone, loss_alone, step)
            loop.clear(model)
            loop.clear(alone)
            target = (y, *targets(step))
            made = pipe.step(x, target=target, **batch(step))
            expected = loop.train(alone, 2, x, loss=loss_alone, target=target, **batch(step))
            assert torch.equal(made, expected.loss), step
            loop.assert_same(loop.gradients(model), loop.gradients(alone))
    return _compiled(caplog)


UNREAD: dict[str, Callable[[int], dict[str, Any]]] = {
    "file names": lambda step: {"names": [f"{step}_{i}.png" for i in range(8)]},
    "a counter": lambda step: {"index": step},
    "a share": lambda step: {"share": step / 3},
    "bytes in a dict": lambda step: {"meta": {"id": [bytes(step), step], "split": "train"}},
    "a path and an array": lambda step: {"at": Path(f"{step}"), "raw": numpy.ones(step + 1)},
}


@pytest.mark.parametrize("names", [*deep(*([what] for what in UNREAD)), [*UNREAD]])
def test_values_that_no_code_reads_compile_once(
    names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def batch(step: int) -> dict[str, Any]:
        return {name: value for what in names for name, value in UNREAD[what](step).items()}

    assert _trained(caplog, batch=batch) == 1


def _several(model: Any, loss: Any, step: int) -> None:
    model.beta, loss.weight = step / 10, 2.0**-step


CHANGES: dict[str, Callable[[Any, Any, int], Any]] = {
    "an attribute": lambda model, loss, step: setattr(model, "beta", step / 10),
    "an entry of a list": lambda model, loss, step: model.rates.__setitem__(0, step / 7),
    "a field of an object": lambda model, loss, step: setattr(model.config, "share", 1 + step),
    "an attribute of the loss": lambda model, loss, step: setattr(loss, "weight", step / 9),
    "several": _several,
}


@pytest.mark.parametrize(
    ("what", "schedule"),
    [
        *((what, "1f1b") for what in CHANGES if what != "several"),
        ("several", "zb-h1"),
        *deep(("several", "1f1b"), *((what, "zb-h1") for what in CHANGES if what != "several")),
    ],
)
def test_numbers_beside_the_batch_compile_twice(
    what: str, schedule: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert _trained(caplog, change=CHANGES[what], schedule=schedule) == 2


def test_numbers_of_the_batch_compile_twice(caplog: pytest.LogCaptureFixture) -> None:
    made = _trained(
        caplog,
        batch=lambda step: {"scale": 1 + step / 7, "names": f"{step}"},
        targets=lambda step: (0.1 * step,),
    )
    assert made == 2


def test_a_branch_on_a_number_compiles_once_for_each_way(caplog: pytest.LogCaptureFixture) -> None:
    change = lambda model, loss, step: setattr(model, "count", step + 1)  # noqa: E731
    # constants for 1, then 2/4 < 1 until 4/4 is not
    assert _trained(caplog, steps=9, change=change) == 3


def test_a_string_that_is_read_compiles_once_for_each_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = _trained(caplog, batch=lambda step: {"mode": ["wide", "narrow"][step % 2], "id": step})
    assert made == 2


def test_a_number_that_no_graph_can_take_is_a_constant(caplog: pytest.LogCaptureFixture) -> None:
    change = lambda model, loss, step: setattr(model.drop, "p", 0.0 if step % 2 else -0.0)  # noqa: E731
    assert _trained(caplog, change=change) == 1  # equal numbers

    def sized(model: Any, loss: Any, step: int) -> None:
        model.first.out_features = 6 + step  # which no code reads
        model.drop.p = 0.0

    caplog.clear()
    assert _trained(caplog, change=sized) == 1


class Cut(nn.Module):
    """Needs the number itself, which a graph cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.length, self.beta = nn.Linear(4, 3), 1, 0.5

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(x[:, : self.length].sum(1, keepdim=True) * x) * self.beta
        return made


def test_a_number_that_is_a_size_is_a_constant_beside_others_that_are_inputs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = Cut()
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    with (
        caplog.at_level(logging.INFO, "fxpipe"),
        fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.mse_loss) as pipe,
    ):
        for step in range(8):
            model.beta = step / 8
            model.length = 1 + step // 4
            loop.clear(model)
            made = pipe.step(x, target=y)
            gradients = loop.gradients(model)
            loop.clear(model)
            assert torch.equal(made, loop.train(model, 2, x, loss=F.mse_loss, target=y).loss)
            loop.assert_same(gradients, loop.gradients(model))
    assert _compiled(caplog) <= 4  # the first, beta, the length's try and its constant


def test_no_object_of_the_user_keeps_what_stood_for_a_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept: dict[str, Any] = {}

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.beta = nn.Linear(4, 3), 0.5

        def forward(self, x: Tensor) -> Tensor:
            kept["twice"] = self.beta * 2
            made: Tensor = self.last(x) * self.beta
            return made

    model = Keeps()
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    # without the comparison, in which the model runs with its own numbers
    with fxpipe.compile(model, ["cpu"], microbatches=2, loss=F.mse_loss) as pipe:
        pipe._compiler.plans._compare = lambda *call: True  # type: ignore[assignment]
        for step in range(4):
            model.beta = 1 + step / 4
            pipe.step(x, target=y)
            assert type(kept["twice"]) is float


def test_batches_in_flight_keep_the_numbers_of_their_own_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    rate = {"l2": 0.0}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + rate["l2"] * output.square().mean()

    alone = DelayedLoop.beside(model, lambda p: torch.optim.SGD(p, 0.1), 4, loss=loss)
    with fxpipe.compile(
        model,
        ["cpu", "cpu"],
        schedule="2bw",
        microbatches=4,
        loss=loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
    ) as pipe:
        for step in range(6):
            rate["l2"] = step / 5
            x, y = torch.randn(8, 4), torch.randn(8, 3)
            assert torch.equal(pipe.step(x, target=y), alone.step(x, y))
        pipe.flush()
        alone.assert_same(model)


def test_what_is_handed_on_is_returned_as_it_was_given() -> None:
    class Hands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, names: Any, step: int) -> dict[str, Any]:
            return {"out": self.layer(x), "names": names, "step": step}

    x = torch.randn(4, 4)
    with fxpipe.compile(
        Hands(), ["cpu"], microbatches=2, loss=lambda out, y: F.mse_loss(out["out"], y)
    ) as pipe:
        for step in range(3):
            names = [f"{step}{i}" for i in range(2)]
            _, output = pipe.step(x, names, step, target=torch.zeros(4, 3), return_output=True)
            assert (output["names"], output["step"]) == (names, step)


def test_an_evaluation_takes_the_present_number() -> None:
    model = Net()
    x = torch.randn(8, 4)
    with fxpipe.compile(model, ["cpu", "cpu"], microbatches=2, loss=Loss()) as pipe:
        for step in range(4):
            model.beta = step / 3
            pipe.step(x, target=torch.zeros(8, dtype=torch.long))
            pipe.eval()
            with torch.no_grad():
                _, penalty = pipe(x)
                parts = [model(part)[1] for part in x.chunk(2)]
            pipe.train()
            assert torch.allclose(penalty, torch.stack(parts).mean()), step
