"""A model that is not compared with its plan is searched for hidden trained tensors all the same,
without being run as a whole with gradients."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.compiler import options
from fxpipe.compiler.model_check.checking import Checking
from fxpipe.errors import TraceError
from tests.helpers.held import Held

LAYERS, ROWS, WIDTH = 12, 256, 16
ACTIVATION = 4 * ROWS * WIDTH

HIDDEN = [torch.ones(WIDTH, requires_grad=True)]


class Last(nn.Module):
    """May ask for a value, and may read a tensor that nothing would train."""

    def __init__(self, asks: bool, hides: bool) -> None:
        super().__init__()
        self.asks, self.hides = asks, hides

    def forward(self, x: Tensor) -> Tensor:
        if self.asks and x.sum() > 1e9:
            return x
        return x * HIDDEN[0] if self.hides else x


def model(asks: bool, hides: bool) -> nn.Module:
    with torch.device("meta"):
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, Last(asks, hides))


def compiled(model: nn.Module) -> None:
    x = torch.ones(2 * ROWS, WIDTH)
    fxpipe.compile(
        model,
        ["cpu"] * 2,
        microbatches=2,
        loss=mse_loss,
        partition=["4"],
        example=((x,), {"target": x}),
    ).close()


asking = pytest.mark.parametrize(
    "asks",
    [
        pytest.param(False, id="on tensors without data"),
        pytest.param(True, id="on real ones", marks=pytest.mark.needs("leaf_modules")),
    ],
)
"""Whether a line of the model needs values, so that it runs on real tensors."""


@pytest.mark.smoke
@asking
def test_a_search_for_hidden_tensors_keeps_no_activations(asks: bool) -> None:
    held, check = Held(), Checking.__call__

    def watched(self: Checking, *args: Any) -> bool:
        with held:
            return check(self, *args)

    with patch.object(options, "WHOLE", 0), patch.object(Checking, "__call__", watched):
        compiled(model(asks, hides=False))
    if asks:
        assert ACTIVATION <= held.most <= 3 * ACTIVATION
    else:
        assert held.most < ACTIVATION


@pytest.mark.smoke
@asking
def test_a_hidden_tensor_of_a_model_that_is_not_compared_is_refused(asks: bool) -> None:
    with patch.object(options, "WHOLE", 0), pytest.raises(TraceError, match=r"shape \(16,\) that"):
        compiled(model(asks, hides=True))
