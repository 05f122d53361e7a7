"""What a model changes while it is only tried and traced: nothing that a step would see."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import fxpipe
from fxpipe.errors import TraceError
from tests.oracles import loop


class Model(nn.Module):
    """Calls a function between two layers. It has a buffer of None, and whatever ``held`` is."""

    seen: Any

    def __init__(self, function: Callable[[Any, Tensor], Any], held: Any = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", None)
        self.function, self.held = function, held

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x) * self.function(self, x))
        return y


def sums(model: Any, x: Tensor) -> Any:
    mean = x.mean(0)
    model.seen = mean if model.seen is None else model.seen + mean
    return model.seen


def sums_in_place(model: Any, x: Tensor) -> Any:
    if model.seen is None:
        model.seen = torch.zeros(3)
    model.seen += x.mean(0)
    return model.seen


def keeps_the_greatest(model: Any, x: Tensor) -> Any:
    greatest = x.amax(0)
    model.seen = greatest if model.seen is None else torch.maximum(model.seen, greatest)
    return model.seen


def averages(model: Any, x: Tensor) -> Any:
    if model.seen is None:
        model.seen = x.mean(0)
    else:
        model.seen.lerp_(x.mean(0), 0.1)
    return model.seen


def remembers_what_it_drops(model: Any, x: Tensor) -> Any:
    model.seen = model.drop(x.mean(0))
    return 2


def registers(model: Any, x: Tensor) -> Any:
    if not hasattr(model, "late"):
        model.register_buffer("late", torch.zeros(()))
    model.late += x.mean()
    return model.late


def counts_in_a_queue(model: Any, x: Tensor) -> Any:
    model.held.append(1)
    return len(model.held)


def counts_in_an_array(model: Any, x: Tensor) -> Any:
    model.held += 1
    return float(model.held[0])


def draws(model: Any, x: Tensor) -> Any:
    return model.held.random()


@pytest.mark.parametrize(
    ("function", "held", "name"),
    [
        (sums, None, "seen"),
        (sums_in_place, None, "seen"),
        (registers, None, "late"),
        (keeps_the_greatest, None, "seen"),
        (averages, None, "seen"),
        (remembers_what_it_drops, None, "seen"),
        (counts_in_a_queue, deque(maxlen=9), "held"),
        (counts_in_an_array, numpy.zeros(1), "held"),
        (draws, random.Random(0), "held"),
        (draws, numpy.random.default_rng(0), "held"),
    ],
)
def test_state_that_every_run_changes_is_refused(
    function: Callable[[Any, Tensor], Any], held: Any, name: str
) -> None:
    model = Model(function, copy.deepcopy(held))
    with (
        fxpipe.compile(model, 1, microbatches=2, loss=mse_loss) as pipe,
        pytest.raises(TraceError, match=rf"every call changes Model\.{name}"),
    ):
        pipe.step(torch.randn(4, 3), target=torch.randn(4, 3))


def test_a_buffer_that_every_run_changes_is_refused_in_a_leaf_module_too() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Model(sums))
    with (
        fxpipe.compile(
            model, 1, microbatches=2, loss=mse_loss, extensions=[fxpipe.LeafModules("1")]
        ) as pipe,
        pytest.raises(TraceError, match=r"every call changes Model\.seen"),
    ):
        pipe.step(torch.randn(4, 3), target=torch.randn(4, 3))


def keeps_a_table(model: Any, x: Tensor) -> Any:
    if model.seen is None:
        model.seen = torch.arange(3.0)
    return model.seen


def registers_a_table(model: Any, x: Tensor) -> Any:
    if not hasattr(model, "table"):
        model.register_buffer("table", torch.arange(3.0), persistent=False)
    return model.table


def three_steps(model: nn.Module) -> tuple[Any, Any]:
    """Train the model over two devices, and a copy of it in the plain loop."""
    torch.manual_seed(0)
    alone, data = copy.deepcopy(model), torch.randn(3, 2, 4, 3)
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    options: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, 0.1), "loss": mse_loss}
    made, expected = [], []
    with fxpipe.compile(model, 2, microbatches=2, **options) as pipe:
        for x, y in data:
            made.append(pipe.step(x, target=y))
            expected.append(loop.train(alone, 2, x, loss=mse_loss, target=y).loss)
            optimizer.step()
            optimizer.zero_grad()
    return (made, model.state_dict()), (expected, alone.state_dict())


@pytest.mark.parametrize("function", [keeps_a_table, registers_a_table])
def test_a_buffer_that_another_run_leaves_as_it_is_trains_as_in_the_loop(
    function: Callable[[Any, Tensor], Any],
) -> None:
    made, expected = three_steps(Model(function))
    torch.testing.assert_close(made, expected, rtol=0, atol=0)


def made_by_the_constructor() -> nn.Module:
    model = Model(sums_in_place)
    model.seen = torch.zeros(3)
    return model


def run_once() -> nn.Module:
    model = Model(sums)
    model(torch.ones(2, 3))
    return model


def averages_run_once() -> nn.Module:
    model = Model(averages)
    model(torch.ones(2, 3))
    return model


@pytest.mark.parametrize("make", [made_by_the_constructor, run_once, averages_run_once])
def test_the_ways_out_of_a_buffer_of_none_train_as_in_the_loop(make: Callable[[], Any]) -> None:
    made, expected = three_steps(make())
    torch.testing.assert_close(made, expected, rtol=0, atol=0)


class Kept(nn.Module):
    """Returns its feature too, if asked."""

    def __init__(self, returns: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.returns = nn.Linear(6, 6), nn.Linear(6, 5), returns

    def forward(self, x: Tensor) -> Any:
        feature = self.first(x)
        out = self.last(feature.tanh())
        return (out, feature) if self.returns else out


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("where", ["dict", "attribute"])
def test_a_feature_that_a_hook_keeps_for_the_loss_has_its_gradient(where: str) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(8, 6), (torch.randint(5, (8,)), torch.randn(8, 6))
    kept: dict[str, Tensor] = {}
    model = Kept()

    def keep(module: Any, inputs: Any, output: Tensor) -> None:
        if where == "dict":
            kept["feature"] = output
        else:
            module.feature = output

    model.first.register_forward_hook(keep)

    def loss(output: Tensor, classes: Tensor, teacher: Tensor) -> Tensor:
        feature: Any = kept["feature"] if where == "dict" else model.first.feature
        return cross_entropy(output, classes) + mse_loss(feature, teacher)

    def returned(output: Any, classes: Tensor, teacher: Tensor) -> Tensor:
        return cross_entropy(output[0], classes) + mse_loss(output[1], teacher)

    returning = Kept(returns=True)
    returning.load_state_dict(model.state_dict())
    with fxpipe.compile(model, 2, microbatches=4, loss=loss) as pipe:
        made = pipe.step(x, target=target)
    expected = loop.train(returning, 4, x, loss=returned, target=target)
    assert torch.equal(made, expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(returning))


class Halved(torch.autograd.Function):
    """Halves the gradient, as a hook on it would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / 2


class Half(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Halved.apply(x)  # type: ignore[no-untyped-call]


class Hooked(nn.Module):
    def __init__(self, hook: bool) -> None:
        super().__init__()
        self.first, self.last, self.hook = nn.Linear(6, 6), nn.Linear(6, 5), hook
        self.halve = Half()

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).tanh()
        if self.hook:
            x.register_hook(lambda gradient: gradient / 2)
        else:
            x = self.halve(x)
        return self.last(x)


def test_a_hook_on_a_gradient_and_a_function_train_as_in_the_loop() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randint(5, (8,))
    hooked, model = Hooked(True), Hooked(False)
    model.load_state_dict(hooked.state_dict())
    alone = copy.deepcopy(hooked)
    expected = loop.train(alone, 4, x, loss=cross_entropy, target=y)
    for each in hooked, model:
        with fxpipe.compile(each, 2, microbatches=4, loss=cross_entropy) as pipe:
            assert torch.equal(pipe.step(x, target=y), expected.loss)
        loop.assert_same(loop.gradients(each), loop.gradients(alone))


def test_a_profiler_and_anomaly_mode_around_a_step_change_nothing() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(8, 6)
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, 2, microbatches=4, loss=mse_loss) as pipe:
        with (
            pytest.warns(UserWarning, match="Anomaly Detection"),
            torch.autograd.detect_anomaly(check_nan=True),
        ):
            first = pipe.step(x, target=x)
        with torch.profiler.profile() as profile:
            second = pipe.step(x, target=x)
    for made in (first, second):
        assert torch.equal(made, loop.train(alone, 4, x, loss=mse_loss, target=x).loss)
    assert profile.key_averages()
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
