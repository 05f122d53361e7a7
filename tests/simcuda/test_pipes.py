"""Pipes on simulated devices: they train as on CPU devices, to the bit, whatever runs late."""

from __future__ import annotations

import gc
import itertools
import os
import random
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxpipe
from fxpipe import DeviceMemoryError, ExecutionError
from fxpipe.runtime.choice import Dispatches
from tests.helpers.profiles import DEEP
from tests.simcuda.drawn import (
    EXTRAS,
    INPUTS,
    LAZY,
    OPTIONS,
    RANDOM,
    SCHEDULES,
    STARVING,
    SUMMED,
    draw,
    wrong,
)
from tests.simcuda.process import on_devices, simulated
from tests.simcuda.training import MODELS

pytestmark = simulated

SEED = int(os.environ.get("FXPIPE_SEED", random.SystemRandom().randrange(10**6)))

PLACES = ["cuda:0", "cuda:1"]

both = pytest.mark.parametrize("dispatch", ["device", "thread"])


def test_settings_are_drawn_of_all_kinds() -> None:
    drawn = [draw(seed) for seed in range(len(SCHEDULES) * len(MODELS))]
    assert {each.parts[:2] for each in drawn} == {*itertools.product(SCHEDULES, MODELS)}
    met = {part for each in drawn for part in each.parts}
    assert {*OPTIONS, *SUMMED, *EXTRAS, *INPUTS, "8 devices"} <= met
    assert all((LAZY, 0) in each.modes for each in drawn)
    assert {mode for each in drawn for mode, _ in each.modes} == {LAZY, RANDOM, STARVING}


@pytest.mark.parametrize("number", range(400 if DEEP else 1))
def test_a_pipe_on_devices_trains_as_on_cpu_devices(number: int) -> None:
    """The seed changes from run to run: every message names it, and ``FXPIPE_SEED`` sets it."""
    assert not wrong(SEED + number, ranks=DEEP)


def stages() -> nn.Module:
    """Two parts; the second one takes memory for what it saves."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4096), nn.Linear(4096, 8))


def short_of_memory() -> tuple[str, int, list[bool]]:
    """A step for which a device has too little memory, and then one for which it has enough."""
    from tests.simcuda import cuda

    x, y = torch.randn(64, 64), torch.arange(64) % 8
    model = stages()
    losses = []
    with fxpipe.compile(model, PLACES, microbatches=4, loss=cross_entropy, partition=["2"]) as pipe:
        losses.append(pipe.step(x, target=y).item())
        torch.cuda.reset_peak_memory_stats(1)
        losses.append(pipe.step(x, target=y).item())
        peak = torch.cuda.max_memory_allocated(1)
        gc.collect()
        with cuda.within(1, peak - 512), pytest.raises(DeviceMemoryError) as raised:
            pipe.step(x, target=y)
        told, device = str(raised.value), raised.value.device
        del raised  # with the frames of the step, and its tensors
        gc.collect()
        with cuda.within(1, peak):
            losses.append(pipe.step(x, target=y).item())
    return told, device, [loss == losses[0] for loss in losses]


def test_a_step_needs_its_peak_to_the_byte_and_names_the_device_that_lacks_it() -> None:
    told, device, equal = on_devices(short_of_memory)
    assert told.startswith("device 1, ")
    assert "the device has no memory left" in told
    assert device == 1
    assert all(equal)


def fails(dispatch: Dispatches, waits: bool) -> tuple[str, str]:
    """An index outside of a table, in one micro-batch of many steps: the error's type and its
    text with notes. If the environment says so, each launch waits until it is done."""
    from tests.simcuda import cuda

    os.environ["CUDA_LAUNCH_BLOCKING"] = "1" if waits else "0"
    cuda.configure(cuda.Mode.EAGER if waits else cuda.Mode.LAZY)
    model = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    x, y = torch.randint(16, (8, 4)), torch.randint(8, (8, 4))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(out.flatten(0, 1), y.flatten())

    options: dict[str, Any] = {"microbatches": 4, "loss": loss, "partition": ["2"]}
    with fxpipe.compile(model, PLACES, extensions=[fxpipe.Dispatch(dispatch)], **options) as pipe:
        pipe.step(x, target=y)
        torch.cuda.synchronize()
        x[5, 0] = 1 << 20
        try:
            for _ in range(2):
                pipe.step(x, target=y)
                with suppress(torch.AcceleratorError):
                    torch.cuda.synchronize()
            pytest.fail("nothing has failed")
        except ExecutionError as error:
            told = "".join([str(error), *getattr(error, "__notes__", [])])
            return type(error).__name__, told


@both
def test_a_kernel_that_fails_late_is_told_with_how_to_find_it(dispatch: Dispatches) -> None:
    kind, told = on_devices(fails, dispatch, False)
    assert kind == "DeviceError"
    assert "CUDA_LAUNCH_BLOCKING=1" in told


@both
def test_with_launches_that_wait_an_error_is_of_its_instruction(dispatch: Dispatches) -> None:
    kind, told = on_devices(fails, dispatch, True)
    assert kind == "ExecutionError"
    assert "forward s0[2]" in told
    assert "since then a device reports" in told
