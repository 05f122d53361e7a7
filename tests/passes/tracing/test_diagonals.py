"""A diagonal that is filled in place has no gradient; one that has is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.oracles import loop


def without_gradient(h: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.zeros_like(h).fill_diagonal_(h.shape[0])
    return h * mask


def comparisons(h: Tensor) -> Tensor:
    return (h > 0).fill_diagonal_(True) * h


class Net(nn.Module):
    """Rows of a batch against each other, with another diagonal."""

    def __init__(self, fill: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.fill = nn.Linear(4, 4), nn.Linear(4, 4), fill

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.last(self.fill(x @ x.T) @ x)
        return out


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("fill", [without_gradient, comparisons], ids=lambda f: f.__name__)
def test_a_mask_with_a_filled_diagonal_trains_as_in_the_loop(
    fill: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model = Net(fill)
    alone = copy.deepcopy(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with fxpipe.compile(model, 2, microbatches=2, loss=F.mse_loss, partition=["last"]) as pipe:
        made = pipe.step(x, target=y)
    assert torch.equal(made, loop.train(alone, 2, x, target=y, loss=F.mse_loss).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


@pytest.mark.parametrize("fill", [lambda h: h.fill_diagonal_(0.5), lambda h: h.detach_()])
def test_what_loses_its_gradient_in_place_trains_as_in_the_loop(
    fill: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model = Net(fill)
    alone = copy.deepcopy(model)
    x, y = torch.randn(2, 8, 4)
    with fxpipe.compile(model, 2, microbatches=2, loss=F.mse_loss, partition=["last"]) as pipe:
        made = pipe.step(x, target=y)
    assert torch.equal(made, loop.train(alone, 2, x, target=y, loss=F.mse_loss).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
