"""Models whose gradients only autograd itself can tell, against the plain loop to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot
from torch.utils.checkpoint import checkpoint

import fxpipe
from tests.oracles import loop


class Steeper(torch.autograd.Function):
    """tanh with another derivative than its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        steeper: Tensor = gradient * (2 - y * y)
        return steeper


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 4)


class OwnFunction(Layers):
    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Steeper.apply
        y: Tensor = self.c(apply(self.b(apply(self.a(x)))))
        return y


class Forces(Layers):
    """The gradient of an energy by its input, as in models of molecules."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.c(self.b(self.a(x).tanh()).tanh()).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


class FunctionalForces(Layers):
    def forward(self, x: Tensor) -> Tensor:
        def energy(z: Tensor) -> Tensor:
            total: Tensor = self.c(self.b(self.a(z).tanh()).tanh()).sum()
            return total

        force: Tensor = torch.func.grad(energy)(x)
        return force


class HookedActivation(Layers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 0.5)
        y: Tensor = self.c(self.b(hidden).tanh())
        return y


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda z: self.b(self.a(z).tanh()).tanh(), x, use_reentrant=False)
        y: Tensor = self.c(hidden)
        return y


class Experts(nn.Module):
    """Leaves an auxiliary loss on itself, which the model reads in the same call."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        chances = self.gate(x).softmax(-1)
        best = one_hot(chances.argmax(-1), 3)
        self.auxiliary = (chances.mean(0) * best.float().mean(0)).sum()
        parts = [e(x) * (chances * best)[:, i, None] for i, e in enumerate(self.experts)]
        return x + torch.stack(parts).sum(0)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Experts(), Experts()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.head(self.second(self.first(x)))
        assert self.first.auxiliary is not None and self.second.auxiliary is not None
        return y, self.first.auxiliary + self.second.auxiliary


class Named(nn.Module):
    """Has attributes that a graph module has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.graph = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.graph(self.code(x).relu())
        return y


class MadeWithGradient(Layers):
    """Makes a tensor that requires a gradient, as vector quantisers do for their loss."""

    def forward(self, x: Tensor) -> Tensor:
        more = torch.zeros((), requires_grad=self.training)
        hidden = self.b(self.a(x).tanh())
        more = more + hidden.square().mean()
        y: Tensor = self.c(hidden) + more
        return y


def with_auxiliary(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return mse_loss(output[0], target) + 0.1 * output[1]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    ("make", "cut", "loss"),
    [
        (OwnFunction, ["b"], mse_loss),
        (FunctionalForces, None, mse_loss),
        (Forces, None, mse_loss),
        (HookedActivation, ["b"], mse_loss),
        (Checkpointed, ["c"], mse_loss),
        (Mixture, ["second"], with_auxiliary),
        (Named, ["graph"], mse_loss),
        (MadeWithGradient, ["c"], mse_loss),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_it_trains_as_the_loop_without_leaf_modules(
    make: Callable[[], nn.Module], cut: list[str] | None, loss: Any, schedule: str
) -> None:
    torch.manual_seed(0)
    model = make().double()
    alone = copy.deepcopy(model)
    x, y = torch.randn(2, 8, 4, dtype=torch.float64).unbind()
    expected = loop.train(alone, 4, x, loss=loss, target=y)
    options: dict[str, Any] = {"partition": cut} if cut else {}
    devices = ["cpu"] * (2 if cut else 1)
    with fxpipe.compile(
        model, devices, schedule=schedule, microbatches=4, loss=loss, **options
    ) as pipe:
        assert torch.equal(pipe.step(x, target=y), expected.loss)
        assert not pipe.traced.calls
        if schedule == "zb-h1":
            assert all(stage.input_grad is not None for stage in pipe.plan.stages)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


class Skips(nn.Module):
    """A value that is read twice in each of three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.c, self.d = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        y = self.b(h + 1).tanh() * h
        z = self.c(y * h).tanh() + h * 3
        out: Tensor = self.d(z * h + h)
        return out


def test_gradients_of_a_value_are_added_in_autograds_order_wherever_its_readers_are() -> None:
    torch.manual_seed(0)
    model = Skips()
    alone = copy.deepcopy(model)
    x, y = torch.randn(32, 4), torch.randint(3, (32,))
    loop.train(alone, 4, x, loss=cross_entropy, target=y)
    with fxpipe.compile(
        model, ["cpu"] * 4, microbatches=4, loss=cross_entropy, partition=["b", "c", "d"]
    ) as pipe:
        pipe.step(x, target=y)
        # a sum that one stage has begun goes on in the stage before it
        between = [(e.source, e.target) for e in pipe.plan.gradients if e.source >= 0]
        assert (3, 2) in between and (2, 1) in between and (1, 0) in between
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
