"""Random numbers depend on the seed and the batch, not on how the model is cut or scheduled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Dirichlet
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.passes.schedule import Recompute
from tests.helpers.profiles import deep
from tests.oracles import loop

RATE = 0.3

Trained = tuple[list[Tensor], dict[str, Tensor | None]]
"""Losses, gradients."""


class Noisy(nn.Module):
    """Every kind of draw that a model is likely to make, spread over four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.drop = nn.Dropout(RATE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.layers[0](x)).tanh()
        x = x + 0.1 * torch.randn_like(x)
        x = nn.functional.dropout(self.layers[1](x), RATE, self.training)
        x = self.layers[2](x) * torch.rand_like(x[:, :1])
        y: Tensor = self.drop(self.layers[3](x).tanh())
        return y


def train(stages: int, schedule: str, steps: int = 2, **options: Any) -> Trained:
    """Losses, and at the end the gradients; seeded as a user does it, before the steps."""
    torch.manual_seed(0)
    model, x, y = Noisy(), torch.randn(7, 6), torch.randn(7, 6)
    with fxpipe.compile(
        model,
        ["cpu"] * stages,
        schedule=schedule,
        microbatches=3,
        loss=mse_loss,
        partition=[f"layers.{index}" for index in range(1, stages)],
        **options,
    ) as pipe:
        torch.manual_seed(5)
        losses = [pipe.step(x, target=y) for _ in range(steps)]
        after = torch.rand(3)
    found = {
        name: gradient for name, gradient in loop.gradients(model).items() if gradient is not None
    }
    assert len(found) == 8
    return losses, {**found, "what the user draws next": after}


@pytest.fixture(scope="module")
def alone() -> Trained:
    return train(1, "gpipe")


@pytest.mark.parametrize(("stages", "schedule"), [*deep((2, "1f1b"), (4, "gpipe")), (3, "zb-h1")])
def test_masks_are_the_same_for_any_cut_and_schedule(
    stages: int, schedule: str, alone: Trained
) -> None:
    losses, gradients = train(stages, schedule)
    assert losses == alone[0]
    loop.assert_same(gradients, alone[1])


def test_modules_that_are_called_as_they_are_draw_the_same_too(**options: Any) -> None:
    options = options or {"extensions": [fxpipe.LeafModules(nn.Linear, nn.Dropout)]}
    losses, gradients = train(1, "gpipe", **options)
    for stages, schedule in (*deep((2, "1f1b"), (4, "gpipe")), (3, "zb-h1")):
        made, found = train(stages, schedule, **options)
        assert made == losses, schedule
        loop.assert_same(found, gradients)


class Sampler(nn.Module):
    """Draws in ways that a graph may not have, and some that PyTorch draws inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(6, 6, num_layers=2, dropout=RATE)
        self.relu = nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.layers(x)[0])
        chances = y.detach().sigmoid()
        counts = torch.binomial(torch.full_like(chances, 5.0), chances) + torch.poisson(chances)
        shares = Dirichlet(chances + 0.1).sample()
        places = torch.multinomial(chances, 2, replacement=True).sum(1, keepdim=True)
        return y * (counts + shares + places) + torch.empty_like(y).random_(3)


def test_leaf_modules_draw_the_same_on_any_stage() -> None:
    found: list[tuple[list[Tensor], dict[str, Tensor | None]]] = []
    for stages, schedule in ((1, "gpipe"), *deep((2, "1f1b")), (3, "zb-h1")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Sampler(), Sampler(), nn.Linear(6, 6))
        x, y = torch.randn(7, 6), torch.randn(7, 6)
        with fxpipe.compile(
            model,
            ["cpu"] * stages,
            schedule=schedule,
            microbatches=3,
            loss=mse_loss,
            extensions=[fxpipe.LeafModules(Sampler)],
        ) as pipe:
            torch.manual_seed(5)
            found.append(([pipe.step(x, target=y) for _ in range(2)], loop.gradients(model)))
    for losses, gradients in found[1:]:
        assert losses == found[0][0]
        loop.assert_same(gradients, found[0][1])
    first, second = found[0][0]
    assert first != second


def test_a_dropout_inside_of_a_leaf_module_may_begin_after_the_trace() -> None:
    """What a leaf module reads causes no new trace; a recomputation draws what its forward drew."""
    found: list[tuple[Tensor, dict[str, Tensor | None]]] = []
    modes: tuple[Recompute, ...] = ("never", "always")
    for stages, recompute in enumerate(modes, 1):
        torch.manual_seed(0)
        drop = nn.Dropout(0.0)
        leaf = nn.Sequential(nn.Linear(6, 6), drop)
        model = nn.Sequential(nn.Linear(6, 6), leaf, nn.Linear(6, 6))
        x, y = torch.randn(7, 6), torch.randn(7, 6)
        with fxpipe.compile(
            model,
            ["cpu"] * stages,
            microbatches=3,
            loss=mse_loss,
            extensions=[fxpipe.LeafModules("1")],
            recompute=recompute,
        ) as pipe:
            without = pipe.step(x, target=y)
            drop.p = RATE
            loop.clear(model)
            torch.manual_seed(5)
            found.append((pipe.step(x, target=y), loop.gradients(model)))
        assert found[-1][0] != without
    assert found[1][0] == found[0][0]
    loop.assert_same(found[1][1], found[0][1])


def test_two_steps_draw_different_masks(
    alone: Trained,
) -> None:
    first, second = alone[0]
    assert first != second


def test_the_same_seed_draws_the_same_masks_again(
    alone: Trained,
) -> None:
    assert train(1, "gpipe")[0] == alone[0]


class Masks(nn.Module):
    """Ones, with dropout in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.first, self.second = nn.Dropout(RATE), nn.Dropout(RATE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x * self.gain), self.second(x * self.gain)


def test_dropout_drops_at_its_rate_and_each_place_and_microbatch_drops_others() -> None:
    torch.manual_seed(0)
    with fxpipe.compile(Masks(), ["cpu"] * 2, microbatches=4) as pipe:
        first, second = pipe(torch.ones(8, 5000))
        again, _ = pipe(torch.ones(8, 5000))
    for mask in (first, second, again):
        assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / (1 - RATE)).item()}
        dropped = (mask == 0).double().mean().item()
        assert dropped == pytest.approx(RATE, abs=0.015)  # 6 standard deviations
        agreeing = (mask[:2] == mask[2:4]).double().mean().item()
        assert agreeing == pytest.approx(RATE**2 + (1 - RATE) ** 2, abs=0.03)
    for a, b in ((first, second), (first, again)):
        agreeing = (a == b).double().mean().item()
        assert agreeing == pytest.approx(RATE**2 + (1 - RATE) ** 2, abs=0.015)


def test_backward_uses_the_masks_of_its_forward() -> None:
    torch.manual_seed(0)
    x = torch.ones(6, 50, requires_grad=True)
    with fxpipe.compile(Masks(), ["cpu"] * 2, microbatches=3) as pipe:
        first, second = pipe(x)
        (first + 2 * second).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (first + 2 * second).detach())


def test_a_model_without_random_operations_leaves_the_generator_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.Linear(3, 3))
    before = torch.get_rng_state()
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=mse_loss) as pipe:
        x = torch.ones(4, 3)
        pipe.step(x, target=x)
    assert torch.equal(torch.get_rng_state(), before)
