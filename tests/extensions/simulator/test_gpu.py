"""What is predicted and profiled of CUDA devices; skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from tests.gpu.real import needs_gpu
from tests.gpu.test_compile_memory import Layers, Sightings, cuda, data
from tests.gpu.test_cuda import places

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.models,
]


@needs_gpu("times are not simulated")
@pytest.mark.parametrize("steps", [1, 3])
def test_a_profile_is_of_the_devices_times(steps: int) -> None:
    """Matrix products of known work: the device's times, not the far shorter ones of launching."""
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)))
    x, y = torch.randn(8192, 4096), torch.randn(8192, 4096)
    loss = nn.functional.mse_loss
    with fxpipe.compile(model, places(2), microbatches=4, loss=loss, partition=["2"]) as pipe:
        pipe.step(x, target=y)
        found = pipe.profile(x, target=y, steps=steps)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(steps):
            pipe.step(x, target=y)
        after.record()
        after.synchronize()
        taken = 1e-3 * before.elapsed_time(after)
        predicted = pipe.simulate(found.costs, steps=steps)
    assert taken / 2 < found.makespan < 2 * taken
    assert all(busy > 0 for busy in found.busy)
    assert predicted.makespan < 2 * found.makespan


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")
def test_a_prediction_puts_no_parameter_on_a_device_that_does_not_run_its_stage() -> None:
    model = Layers(4)
    x, y = data(8)
    loss = nn.functional.mse_loss
    with (
        fxpipe.compile(model, cuda(2), microbatches=4, partition=["layers.2"], loss=loss) as pipe,
        Sightings(model) as sightings,
    ):
        pipe.prepare(x, target=y)
        pipe.simulate()
    assert sightings.seen == {number: {torch.device("cuda", number // 2)} for number in range(4)}
