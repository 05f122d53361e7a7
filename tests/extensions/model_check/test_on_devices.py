"""A plan over several simulated devices is compared with the model, too."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.errors import TraceError
from tests.extensions.model_check.test_check import Backwards
from tests.simcuda.process import on_devices, simulated

pytestmark = simulated


class Layer(nn.Linear):
    def __init__(self, reverses: bool) -> None:
        super().__init__(4, 4)
        self.reverses = reverses

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return Backwards.apply(y) if self.reverses else y  # type: ignore[no-untyped-call]


def refusal(reverses: bool) -> str:
    """Why a plan is refused that has lost a backward, if there is one; else an empty text."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(reverses), nn.BatchNorm1d(4), nn.Tanh(), Layer(False))
    devices, x = ["cuda:0", "cuda:1"], torch.randn(8, 4)
    lost = patch("fxpipe.passes.tracing.capturing.checkpoints_opened", nullcontext)
    with (
        lost,
        fxpipe.compile(model, devices, partition=["3"], microbatches=2, loss=mse_loss) as pipe,
    ):
        try:
            pipe.step(x, target=x)
        except TraceError as error:
            return str(error)
    assert {str(parameter.device) for parameter in model.parameters()} == {*devices}
    return ""


def test_a_plan_over_several_devices_that_has_lost_a_backward_is_refused() -> None:
    assert on_devices(refusal, False) == ""
    told = on_devices(refusal, True)
    assert "does not compute what the model computes: the gradient of '0.weight'" in told
