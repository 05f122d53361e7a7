"""Autograd functions keep the backward that their author wrote, whatever traces the model."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import TraceError
from fxpipe.torchtools.functions import functions_kept
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


class Round(torch.autograd.Function):
    """A straight-through estimator with two results, one of them not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x.round() * weight, positive

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * (x.abs() < 1), (gradient * x.round()).sum(0) + 0 * weight


class Setup(torch.autograd.Function):
    """The newer style, with a setup_context, nested inputs, and a gradient only where needed."""

    @staticmethod
    def forward(x: Tensor, exponent: int, other: Tensor) -> Any:
        return x**exponent, None, exponent, other * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.exponent, _ = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        here = 3.0 * gradients[0] * x if ctx.needs_input_grad[0] else None
        return here, None, 5.0 * gradients[3] if ctx.needs_input_grad[2] else None


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


def reverse(model: Model, x: Tensor) -> Tensor:
    y: Tensor = model.second(applied(Reverse, x, 0.5)) + applied(Reverse, x, 2.0)
    return y


def rounded(model: Model, x: Tensor) -> Tensor:
    y, positive = applied(Round, model.second(x), model.second.bias)
    found: Tensor = y * positive
    return found


def new_style(model: Model, x: Tensor) -> Tensor:
    y, nothing, exponent, other = applied(Setup, model.second(x), 2, x.detach() + model.first.bias)
    assert nothing is None
    found: Tensor = y * exponent + other
    return found


def sized(model: Model, x: Tensor) -> Tensor:
    y: Tensor = applied(Sized, model.second(x).tanh(), x.shape[0])
    return y


def nested(model: Model, x: Tensor) -> Tensor:
    y: Tensor = applied(Outer, model.second(x).tanh())
    return y


def untrained(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = applied(Reverse, model.second(x), 3.0)
    found: Tensor = x * y
    return found


CASES: list[Case] = [reverse, rounded, new_style, sized, nested, untrained]


@pytest.mark.parametrize("case", CASES)
def test_their_gradients_are_the_loops(case: Case) -> None:
    assert_the_loops(Model(case))


def assert_the_loops(model: nn.Module, extensions: Any = ()) -> None:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.double()
    alone = copy.deepcopy(model)
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        microbatches=3,
        loss=mse_loss,
        extensions=extensions,
        partition=["third"],
    ) as pipe:
        for samples in (7, 9):
            x, y = torch.randn(2, samples, 4, dtype=torch.float64).unbind()
            made = pipe.step(x, target=y)
            assert torch.equal(made, loop.train(alone, 3, x, loss=mse_loss, target=y).loss)
            loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-13)
        assert len(pipe._compiler.plans.graphs) == 1


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_one_that_writes_into_its_input_is_refused_by_name() -> None:
    def case(model: Model, x: Tensor) -> Tensor:
        y: Tensor = applied(Doubles, model.second(x))
        return y

    with pytest.raises(TraceError, match=r"test_own_backward.Doubles writes into its input.*copy"):
        assert_the_loops(Model(case))


def test_outside_of_a_trace_and_in_other_threads_functions_are_as_ever() -> None:
    x = torch.randn(3, requires_grad=True)
    before = torch.autograd.Function.__dict__["apply"]
    with functions_kept(), functions_kept():
        pass
    assert torch.autograd.Function.__dict__["apply"] is before
    applied(Reverse, x, 2.0).sum().backward()
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


def test_a_model_with_a_function_of_its_own_is_given_up_with_its_pipe() -> None:
    model = Model(lambda model, x: applied(Reverse, x, 2.0))
    known = weakref.ref(model)
    with fxpipe.compile(model, ["cpu"], microbatches=2, loss=mse_loss) as pipe:
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
    del model, pipe
    gc.collect()
    assert known() is None
