"""The loss of a batch is that of the whole batch, however it is split into micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import fxpipe
from fxpipe import InputError
from tests.helpers.losses import assert_whole, net, rows
from tests.oracles import loop


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_are_averaged_or_added_up(reduction: Any, each: bool) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, reduction="none" if each else reduction)

    def whole(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, reduction=reduction)

    assert_whole(loss, *rows(7), 3, whole, reduction=reduction)


def test_a_sum_that_the_model_returns_is_added_up() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(self.net(x), y, reduction="sum")

    model = Summed()
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=3, reduction="sum") as pipe:
        loss = pipe.step(*rows(8))
        stepped = loop.gradients(model)
        loop.clear(model)
        called = pipe(*rows(8))
        called.backward()
    expected = alone(*rows(8))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    loop.assert_same(stepped, loop.gradients(alone), 1e-12)
    assert torch.equal(called, loss)
    loop.assert_same(loop.gradients(model), stepped)


def test_an_unknown_reduction_is_refused() -> None:
    given: Any = "men"
    with pytest.raises(InputError, match="there is no reduction 'men': did you mean 'mean'"):
        fxpipe.compile(net(), ["cpu"], loss=mse_loss, reduction=given)
