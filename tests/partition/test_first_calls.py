"""Whatever a pipe is called for first, its cut is one for training, and training is the loop's."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxpipe
from fxpipe.compiler import passes
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.passes.runner import Pass
from tests.helpers.profiles import deep
from tests.oracles import loop

MICROBATCHES = 4


class Net(nn.Module):
    """Values that are read early and late."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 5)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = skip = self.first(x)
        side = self.layers[1](h)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        y: Tensor = self.last(h + side + skip)
        return y


class Noisy(Net):
    """More readers in training than in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        h = skip = self.first(x)
        side = self.layers[1](h)
        for index, layer in enumerate(self.layers):
            h = h + torch.tanh(layer(h))
            if self.training and index:
                h = h + skip.sin() + side.cos() * skip
        y: Tensor = self.last(h + side + skip)
        return y


class Conditioned(Net):
    """Values that depend on no parameter are read early and late."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        gain = x.sin()
        h, side = self.first(x), self.layers[1](x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h) * gain) * x
        y: Tensor = self.last(h + side + gain)
        return y


@pytest.fixture
def drawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Operations cost what is drawn by a seed, and backwards as much as forwards if there are any:
    so the cut does not depend on the machine."""

    def draw(costs: Mapping[str, NodeCost]) -> dict[str, NodeCost]:
        trained, drawn = any(cost.backward for cost in costs.values()), dict[str, NodeCost]()
        for name in costs:
            seconds = Random(zlib.crc32(f"{name} {request.param}".encode())).random() ** 4
            drawn[name] = NodeCost(seconds, seconds if trained else 0.0, 1)
        return drawn

    with patch.dict(passes.LISTS, measure=(*passes.MEASURE, Pass(draw, "costs", "costs"))):
        yield


def nothing(pipe: fxpipe.Pipeline, x: Tensor) -> None:
    pass


def evaluate(pipe: fxpipe.Pipeline, x: Tensor) -> None:
    pipe.eval()(x)
    pipe.train()


def without_gradients(pipe: fxpipe.Pipeline, x: Tensor) -> None:
    with torch.no_grad():
        pipe(x)


def in_inference_mode(pipe: fxpipe.Pipeline, x: Tensor) -> None:
    with torch.inference_mode():
        pipe(x * 2)


def frozen(pipe: fxpipe.Pipeline, x: Tensor) -> None:
    pipe.requires_grad_(False)
    pipe(x)
    pipe.requires_grad_(True)


def printed(pipe: fxpipe.Pipeline, x: Tensor) -> None:
    repr(pipe)
    evaluate(pipe, x)
    repr(pipe), str(pipe.plan)


def loaded(pipe: fxpipe.Pipeline, x: Tensor) -> None:
    pipe.load_state_dict(copy.deepcopy(pipe.state_dict()))
    evaluate(pipe, x)


def stepped(pipe: fxpipe.Pipeline, x: Tensor) -> None:
    pipe.step(x, target=torch.zeros(len(x), dtype=torch.long))


First = Callable[[fxpipe.Pipeline, Tensor], None]
FIRST: list[First] = [evaluate, without_gradients, in_inference_mode, frozen, printed, loaded]


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(8, 8, generator=random)
    return x, torch.randint(5, (8,), generator=random)


def twins(kind: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = kind()
    return model, copy.deepcopy(model)


def compiled(model: nn.Module, devices: int = 2, **options: Any) -> fxpipe.Pipeline:
    options = {"schedule": "interleaved-1f1b", "loss": cross_entropy, **options}
    return fxpipe.compile(model, devices, microbatches=MICROBATCHES, **options)


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("drawn", [0, *deep(1)], indirect=True)
@pytest.mark.usefixtures("drawn")
def test_training_after_another_first_call_is_the_loops(first: First) -> None:
    model, alone = twins(Net)
    x, y = batch()
    with compiled(model) as pipe:
        first(pipe, x)
        pipe.step(x, target=y)
    loop.train(alone, MICROBATCHES, x, loss=cross_entropy, target=y)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


@pytest.mark.parametrize("drawn", [3], indirect=True)
@pytest.mark.usefixtures("drawn")
def test_what_only_training_computes_keeps_the_order_of_the_model() -> None:
    model, alone = twins(Noisy)
    x, y = batch()
    with compiled(model) as pipe:
        evaluate(pipe, x)
        pipe.step(x, target=y)
    loop.train(alone, MICROBATCHES, x, loss=cross_entropy, target=y)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


@pytest.mark.parametrize("first", [stepped, evaluate])
@pytest.mark.parametrize("drawn", [4], indirect=True)
@pytest.mark.usefixtures("drawn")
def test_gradients_of_an_input_are_the_loops_after_calls_that_wanted_none(first: First) -> None:
    model, alone = twins(Conditioned)
    x, _ = batch()
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with compiled(model) as pipe:
        first(pipe, x)
        pipe(ours).sum().backward()
    torch.cat([alone(part) for part in theirs.tensor_split(MICROBATCHES)]).sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


def test_stages_are_measured_as_for_training() -> None:
    x, y = batch()
    with compiled(Net(), schedule="1f1b") as pipe:
        evaluate(pipe, x)
        measured = [stage.costs for stage in pipe.plan.stages]
        pipe.step(x, target=y)
        costs = [stage.costs for stage in pipe.plan.stages]
    assert measured == costs
    assert all(cost is not None and cost.forward and cost.backward for cost in costs)


class Gated(nn.Module):
    """Computes a gate without gradients, and makes a constant in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        with torch.no_grad():
            gate = h.sigmoid()
        y: Tensor = self.last(h * gate * torch.tensor([0.5, 1.0] * 4))
        return y


@pytest.mark.parametrize("first", [nothing, without_gradients, in_inference_mode])
def test_a_graph_made_for_inference_trains_later(first: First) -> None:
    model, alone = twins(Gated)
    x, y = batch()
    with compiled(model, schedule="1f1b", loss=None) as pipe:
        first(pipe, x)
        cross_entropy(pipe(x), y, reduction="sum").backward()
    for rows, target in zip(x.split(2), y.split(2), strict=True):
        cross_entropy(alone(rows), target, reduction="sum").backward()
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


@torch.library.custom_op("first_calls::plus", mutates_args=())
def plus(x: Tensor) -> Tensor:
    """An operation without a derivative."""
    return x + 1


@torch.library.custom_op("first_calls::times", mutates_args=())
def times(x: Tensor) -> Tensor:
    """An operation whose derivative fails when it runs."""
    return x * 2


@torch.library.custom_op("first_calls::fails", mutates_args=())
def fails(x: Tensor) -> Tensor:
    raise MemoryError("too large")


for operation in (plus, times, fails):
    operation.register_fake(lambda x: torch.empty_like(x))
times.register_autograd(lambda context, gradient: fails(gradient))


class Around(nn.Module):
    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.operation = nn.Linear(8, 8), nn.Linear(8, 5), operation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.operation(self.first(x)))
        return y


@pytest.mark.parametrize("operation", [plus, times], ids=["no derivative", "failing"])
def test_a_model_that_cannot_be_trained_runs_inference(
    operation: Callable[[Tensor], Tensor],
) -> None:
    model, (x, _) = Around(operation), batch()
    with compiled(model, schedule="1f1b") as pipe:
        assert torch.equal(pipe.eval()(x), torch.cat([model(part) for part in x.split(2)]))
        costs: list[Mapping[str, Any]] = [vars(stage.costs) for stage in pipe.plan.stages]
        assert all(cost["forward"] and not cost["backward"] for cost in costs)
