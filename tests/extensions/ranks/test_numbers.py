"""Numbers that change from step to step are inputs of the graphs of all ranks, or of none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.oracles import loop

STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.beta, self.width = 0.5, 1

    def forward(self, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x)) * scale
        return self.last(h[:, : self.width] + h), self.beta * h.square().mean()


def loss(output: tuple[Tensor, Tensor], target: Tensor, share: float) -> Tensor:
    return F.mse_loss(output[0], target) * share + output[1]


def _batches(model: Net) -> Any:
    for step in range(STEPS):
        torch.manual_seed(step)
        model.beta, model.width = step / 7, 1 if step < 2 else 6
        yield (torch.randn(4, 4), 1 + step / 5), (torch.randn(4, 3), 1 - step / 10)


def train(mesh: DeviceMesh) -> tuple[list[Tensor], dict[str, Tensor], int]:
    torch.manual_seed(0)
    model = Net()
    with fxpipe.compile(model, mesh, microbatches=2, loss=loss) as pipe:
        losses = [pipe.step(*given, target=target) for given, target in _batches(model)]
        named = model.named_parameters()
        gradients = {name: p.grad for name, p in named if p.grad is not None and not p.is_meta}
        return losses, gradients, pipe._compiler.plans.made


def test_ranks_take_numbers_alike() -> None:
    torch.manual_seed(0)
    alone = Net()
    expected = [
        loop.train(alone, 2, *given, loss=loss, target=target).loss
        for given, target in _batches(alone)
    ]
    ranks = on_ranks(2, train)
    found: dict[str, Tensor] = {}
    for losses, gradients, made in ranks:
        assert all(map(torch.equal, losses, expected))
        assert made == ranks[0][2]
        found |= gradients
    loop.assert_same(found, loop.gradients(alone))
