"""Slices on simulated devices: as on CPU devices, without races or waits of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxpipe
from fxpipe.schedules.one_f_one_b import seq1f1b
from tests.extensions.slices.test_slices import batch, loss, made
from tests.simcuda.process import on_devices, simulated

pytestmark = simulated


def trained(devices: list[str], steps: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    """The losses, and the parameters after some steps of SGD."""
    from tests.simcuda import cuda

    model = made()
    options: dict[str, Any] = {"microbatches": 2, "loss": loss, "extensions": [fxpipe.Slices()]}
    options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    with fxpipe.compile(model, devices, schedule=seq1f1b(3), **options) as pipe:
        losses = []
        words, places, target = (x.to(devices[0]) for x in batch())
        for _ in range(steps):
            losses.append(float(pipe.step(words, places, target=target)))
        assert not cuda.take().races
        return losses, [p.detach().cpu() for p in model.parameters()]


def compared() -> None:
    from tests.simcuda import cuda

    expected = trained(["cpu"] * 2)
    for mode, seed in ((cuda.Mode.LAZY, 0), (cuda.Mode.RANDOM, 1)):
        cuda.configure(mode, seed)
        torch.testing.assert_close(trained(["cuda:0", "cuda:1"]), expected, rtol=0, atol=0)


@pytest.mark.smoke
def test_slices_train_on_devices_as_on_the_host() -> None:
    on_devices(compared)
