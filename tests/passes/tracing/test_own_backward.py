"""Modules with autograd functions keep the backward that their author wrote."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import fxpipe
from fxpipe.torchtools.functions import checkpoints_opened
from tests.oracles import loop

Case = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.case = case

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(self.case(self, self.first(x)))
        return y


def applied(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class Reverse(torch.autograd.Function):
    """The identity, as a view, with its gradient turned round and scaled by an argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.scale * gradient, None


class Sized(torch.autograd.Function):
    """Takes the batch size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, samples: int) -> Tensor:
        ctx.samples = samples
        return x / samples

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.samples, None


class Outer(torch.autograd.Function):
    """Calls another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y: Tensor = applied(Reverse, x, 2.0) * 3
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 1


class Calling(nn.Module):
    """A submodule that calls functions, in turn."""

    def __init__(self, *calls: tuple[Any, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).tanh()
        for function, *args in self.calls:
            y = applied(function, y, *args)
        return y


def assert_the_loops(model: nn.Module) -> None:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.double()
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, loss=mse_loss, partition=["2"]) as pipe:
        for samples in (7, 9):
            x, y = torch.randn(2, samples, 4, dtype=torch.float64).unbind()
            made = pipe.step(x, target=y)
            assert torch.equal(made, loop.train(alone, 3, x, loss=mse_loss, target=y).loss)
            loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-13)


CASES: list[list[tuple[Any, ...]]] = [[(Reverse, 0.5), (Reverse, 2.0)], [(Sized, 3)], [(Outer,)]]


@pytest.mark.parametrize("calls", CASES)
def test_a_submodule_with_functions_is_called_as_it_is_with_the_loops_gradients(
    calls: list[tuple[Any, ...]],
) -> None:
    assert_the_loops(nn.Sequential(nn.Linear(4, 4), Calling(*calls), nn.Linear(4, 4)))


def test_a_function_in_the_models_own_forward_has_the_loops_gradients() -> None:
    model = Model(lambda model, x: applied(Reverse, x, 2.0)).double()
    alone = copy.deepcopy(model)
    x, y = torch.randn(2, 4, 4, dtype=torch.float64)
    with fxpipe.compile(model, ["cpu"], microbatches=2, loss=mse_loss) as pipe:
        made = pipe.step(x, target=y)
    assert torch.equal(made, loop.train(alone, 2, x, loss=mse_loss, target=y).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_a_loss_with_a_function_is_called_as_it_is() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(applied(Reverse, output, 2.0), target)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    alone, x = copy.deepcopy(model), torch.randn(6, 4)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, loss=loss) as pipe:
        made = pipe.step(x, target=x)
    assert torch.equal(made, loop.train(alone, 3, x, loss=loss, target=x).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_outside_of_a_trace_checkpoints_and_inside_other_functions_are_as_ever() -> None:
    x = torch.randn(3, requires_grad=True)
    before = CheckpointFunction.apply
    with checkpoints_opened(), checkpoints_opened(), ThreadPoolExecutor(1) as other:
        other.submit(lambda: applied(Reverse, x, 2.0).sum().backward()).result()
    assert CheckpointFunction.apply == before
    assert torch.equal(x.grad, torch.full((3,), -2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpoints_inside_of_a_model_change_nothing(reentrant: bool, dropout: float) -> None:
    def layer(model: Model, x: Tensor) -> Tensor:
        return nn.functional.dropout(model.second(x).tanh(), dropout)

    def inside(model: Model, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(layer, model, x, use_reentrant=reentrant)
        return y

    found = []
    for case in (inside, layer):
        torch.manual_seed(0)
        model = Model(case)
        x = torch.randn(6, 4)
        with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, loss=mse_loss) as pipe:
            pipe.step(x, target=x)
        found.append(loop.gradients(model))
    loop.assert_same(found[0], found[1])
