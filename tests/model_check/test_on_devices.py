"""A plan over several simulated devices is compared with the model, too."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.errors import TraceError
from fxpipe.ir.traced import Traced
from fxpipe.passes.tracing.halves import Halves
from tests.model_check.test_check import bend_a_gradient
from tests.simcuda.process import on_devices, simulated

pytestmark = simulated


def refusal(bends: bool) -> str:
    """Why a plan is refused whose backward is another, if it is; else an empty text."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)
    model, whole = nn.Sequential(*layers), Halves.traced
    devices, x = ["cuda:0", "cuda:1"], torch.randn(8, 4)

    def bent(halves: Halves) -> Traced:
        traced = whole(halves)
        bend_a_gradient(traced)
        return traced

    with (
        patch.object(Halves, "traced", bent) if bends else nullcontext(),
        fxpipe.compile(model, devices, partition=["3"], microbatches=2, loss=mse_loss) as pipe,
    ):
        try:
            pipe.step(x, target=x)
        except TraceError as error:
            return str(error)
    assert {str(parameter.device) for parameter in model.parameters()} == {*devices}
    return ""


def test_a_plan_over_several_devices_whose_backward_is_another_is_refused() -> None:
    assert on_devices(refusal, False) == ""
    told = on_devices(refusal, True)
    assert "does not compute what the model computes: the gradient of '" in told
