"""A diagonal that the model fills in place has the gradients of a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.oracles import loop


def squares(h: Tensor) -> Tensor:
    return h.fill_diagonal_(0.5)


def parts(h: Tensor) -> Tensor:
    h[:, 1:3].fill_diagonal_(-1.0)
    return h


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
@pytest.mark.parametrize(
    "fill", [squares, parts, without_gradient, comparisons], ids=lambda f: f.__name__
)
def test_a_filled_diagonal_has_the_gradients_of_a_loop(fill: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Net(fill)
    alone = copy.deepcopy(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with fxpipe.compile(model, 2, microbatches=2, loss=F.mse_loss, partition=["last"]) as pipe:
        made = pipe.step(x, target=y)
    assert torch.equal(made, loop.train(alone, 2, x, target=y, loss=F.mse_loss).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
