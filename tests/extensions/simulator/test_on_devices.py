"""What is predicted and profiled of devices with streams, on simulated ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxpipe
from fxpipe.runtime.choice import Dispatches
from tests.extensions.simulator import test_gpu
from tests.extensions.simulator.test_memory_predicted import Work, transformer, unet
from tests.extensions.streams.test_backend import PLACES, both, pipe_of
from tests.helpers.profiles import deep
from tests.helpers.tiny import Tiny, batch
from tests.simcuda.process import on_devices, simulated
from tests.simcuda.test_memory import SGD, Adam, Optimizer, assert_within, counted, peaks, use

pytestmark = [simulated, pytest.mark.models]


def profiled(dispatch: Dispatches) -> None:
    x, y = batch(8)
    with pipe_of(Tiny(), PLACES, extensions=[fxpipe.Dispatch(dispatch)]) as pipe:
        pipe.step(x, target=y)
        found = pipe.profile(x, target=y, steps=2)
        assert found.measured and found.steps == 2
        for device in range(2):
            starts, ends = found.events.starts[device], found.events.ends[device]
            assert all(start <= end for start, end in zip(starts, ends, strict=True))
            assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        assert all(busy > 0 for busy in found.busy)
        assert set(pipe.simulate(found.costs, steps=2).costs) == set(found.costs)


@both
def test_a_profile_takes_its_times_on_the_streams(dispatch: Dispatches) -> None:
    on_devices(profiled, dispatch)


def test_a_prediction_puts_weights_on_no_other_devices() -> None:
    on_devices(test_gpu.test_a_prediction_puts_no_parameter_on_a_device_that_does_not_run_its_stage)


def looked_at(
    options: Mapping[str, Any], optimizer: Optimizer
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Device → the bytes that it holds at most as predicted, in steps, while compiling, and in
    everything else, predictions and profiles too."""
    predicted: list[int] = []

    def look(pipe: fxpipe.Pipeline, x: Tensor, y: Tensor) -> None:
        predicted.extend(memory.peak for memory in pipe.simulate().memory)
        use(pipe, x, y)
        pipe.profile(x, target=y)
        pipe.flush()

    return predicted, *counted(options, optimizer, look)


@pytest.mark.parametrize("optimizer", [Adam, *deep(SGD)])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "2bw"},
        *deep({"schedule": "1f1b", "extensions": ["offload"]}),
        *deep({"schedule": "1f1b"}, {"schedule": "gpipe"}, {"schedule": "zb-h1"}),
        *deep({"schedule": "1f1b", "recompute": "always"}),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_devices_hold_what_was_predicted_and_no_more_while_compiling(
    options: Mapping[str, Any], optimizer: Optimizer
) -> None:
    predicted, steps, compiling, others = on_devices(looked_at, options, optimizer)
    assert predicted == pytest.approx(steps, rel=0.005)
    assert_within(steps, compiling, others)


class Skip(nn.Module):
    """What crosses to the second stage is most of what devices hold: a value and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(192, 192), nn.Linear(192, 192)
        self.third, self.last = nn.Linear(192, 192), nn.Linear(192, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        y: Tensor = self.last(torch.tanh(self.third(self.second(h) + h)) * h)
        return y


def crossing(schedule: str) -> tuple[list[int], list[int]]:
    """Device → the bytes that it holds at most as predicted, and in steps."""
    x, y = torch.randn(256, 192), torch.arange(256) % 3
    options: dict[str, Any] = {"schedule": schedule, "microbatches": 4, "optimizer": SGD}
    with fxpipe.compile(Skip(), PLACES, loss=cross_entropy, partition=["third"], **options) as pipe:
        for _ in range(3):
            pipe.step(x, target=y)
        with peaks(2) as steps:
            for _ in range(3):
                pipe.step(x, target=y)
        return [memory.peak for memory in pipe.simulate().memory], steps


@pytest.mark.parametrize("schedule", ["1f1b", *deep("zb-h1", "2bw")])
def test_what_arrives_ahead_of_its_use_is_predicted_from_its_launch(schedule: str) -> None:
    predicted, steps = on_devices(crossing, schedule)
    assert predicted == pytest.approx(steps, rel=0.005)


def of_small_tensors(
    make: Callable[[], Work], optimizer: Optimizer, options: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    """Device → the bytes that it holds at most as predicted, and in steps."""
    torch.manual_seed(0)
    model, x, y, loss = make()
    given = {"microbatches": 4, "optimizer": optimizer, **options}
    with fxpipe.compile(model, PLACES, loss=loss, **given) as pipe:
        for _ in range(3):
            pipe.step(x, target=y)
        with peaks(2) as steps:
            for _ in range(3):
                pipe.step(x, target=y)
            pipe.flush()
        return [memory.peak for memory in pipe.simulate().memory], steps


@pytest.mark.parametrize(
    ("make", "optimizer", "options"),
    [
        (unet, SGD, {"schedule": "1f1b"}),
        (transformer, Adam, {"schedule": "zb-h1"}),
        *deep(
            (unet, Adam, {"schedule": "gpipe", "recompute": "always"}),
            (unet, SGD, {"schedule": "2bw"}),
            (unet, Adam, {"schedule": "interleaved-1f1b"}),
            (transformer, SGD, {"schedule": "1f1b"}),
            (transformer, Adam, {"schedule": "2bw"}),
            (transformer, SGD, {"schedule": "gpipe", "recompute": "always"}),
        ),
    ],
)
def test_small_tensors_take_whole_blocks_of_memory(
    make: Callable[[], Work], optimizer: Optimizer, options: Mapping[str, Any]
) -> None:
    predicted, steps = on_devices(of_small_tensors, make, optimizer, options)
    assert predicted == pytest.approx(steps, rel=0.005)
