"""What the core watches by itself, without the extension that watches Python state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe

pytestmark = pytest.mark.traces


class Scaled(nn.Module):
    """A linear layer with dropout, times a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.dropout = nn.Dropout(1.0)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)) + self.dropout(x).sum(-1, keepdim=True))
        return y * self.scale


def test_modes_parameters_and_plain_numbers_count() -> None:
    torch.manual_seed(0)
    model = Scaled()
    alone = copy.deepcopy(model)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=mse_loss) as pipe:

        def compare() -> None:
            pipe.zero_grad()
            alone.zero_grad()
            loss = mse_loss(alone(x), y)
            loss.backward()
            torch.testing.assert_close(pipe.step(x, target=y), loss.detach())
            for (name, mine), theirs in zip(
                model.named_parameters(), alone.parameters(), strict=True
            ):
                assert (mine.grad is None) == (theirs.grad is None), name
                if mine.grad is not None:
                    torch.testing.assert_close(mine.grad, theirs.grad)

        compare()
        for each in (model, alone):
            each.first.weight.requires_grad_(False)
        compare()
        for each in (model, alone):
            each.eval()
        compare()  # dropout lets all through
        model.scale = 3.0
        alone.scale = 3.0
        compare()


def test_a_state_that_is_come_back_to_is_not_traced_anew() -> None:
    class Switched(Scaled):
        other, factor = False, 3.0  # which only the other way reads

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor if self.other else super().forward(x)

    model, x, y = Switched(), torch.randn(4, 3), torch.randn(4, 2)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=mse_loss) as pipe:
        guard, plans = pipe._compiler._guard, pipe._compiler.plans
        pipe.step(x, target=y)
        number, model.other = guard.present(), True
        pipe.step(x, target=y)
        model.other = False
        guard.back_to(number)
        made = plans.made
        pipe.step(x, target=y)
        assert plans.made == made and guard.present() == number
        model.scale = 5.0
        pipe.step(x, target=y)
        assert guard.present() != number
