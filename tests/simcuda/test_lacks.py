"""Devices that lack memory outside of steps are named, with their stages and what to do."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe import DeviceMemoryError
from tests.simcuda.process import on_devices, simulated

pytestmark = simulated

WIDTH = 128
LAYER = 4 * (WIDTH + 1) * WIDTH
"""Bytes of a layer; the second stage has four, the first one has one."""

Told = tuple[str, int, int | None, list[float]]
"""The error's text, its device and stage, and losses after it where there is enough memory."""


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))


def pipe_of(model: nn.Module) -> fxpipe.Pipeline:
    return fxpipe.compile(
        model,
        ["cuda:0", "cuda:1"],
        microbatches=2,
        partition=["1"],
        loss=mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
    )


def told(device: int, limit: int, call: Callable[[], object]) -> tuple[str, int, int | None]:
    from tests.simcuda import cuda

    gc.collect()
    with cuda.within(device, limit), pytest.raises(DeviceMemoryError) as raised:
        call()
    error = raised.value
    return str(error), error.device, error.stage


def lacks(what: str, folder: Path) -> Told:
    x = torch.ones(8, WIDTH)
    if what == "compile":
        with pipe_of(made()) as pipe:
            said = told(0, LAYER // 2, lambda: pipe.prepare(x, target=x))
            return *said, [float(pipe.step(x, target=x)) for _ in range(2)]
    if what == "move":
        with pipe_of(made()) as pipe:
            said = told(1, 3 * LAYER, lambda: pipe.step(x, target=x))
            return *said, [float(pipe.step(x, target=x)) for _ in range(2)]
    with pipe_of(made()) as pipe:
        losses = [float(pipe.step(x, target=x)) for _ in range(2)]
        pipe.load_state_dict(made().state_dict())
        pipe.save(folder / "run")
        del pipe
    state = made().state_dict()
    with torch.device("meta"):
        model = made()
    with pipe_of(model) as pipe:
        pipe.prepare(x, target=x)
        if what == "weights":
            said = told(1, 3 * LAYER, lambda: pipe.load_state_dict(state))
            pipe.load_state_dict(state)
            return *said, [float(pipe.step(x, target=x)) for _ in range(2)]
        said = told(1, 6 * LAYER, lambda: pipe.load(folder / "run"))
        pipe.load(folder / "run")
        return *said, [float(pipe.step(x, target=x)), losses[1]]


def plain() -> list[float]:
    """The losses of two steps by a plain loop on one device."""
    model, x = made(), torch.ones(8, WIDTH)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        parts = [mse_loss(model(part), part) / 2 for part in x.chunk(2)]
        losses.append(float(sum(part.detach() for part in parts)))
        for part in parts:
            part.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize(
    ("what", "device", "stage", "parts"),
    [
        ("compile", 0, None, ["device 0 (cuda:0) has no memory left to compile", "micro-batches"]),
        ("move", 1, 1, ["device 1 (cuda:1), stage 1,", "parameters and buffers", "partition"]),
        ("weights", 1, 1, ["device 1 (cuda:1), stage 1,", "state of their optimizer", "partition"]),
        (
            "checkpoint",
            1,
            1,
            ["device 1 (cuda:1), stage 1,", "state of their optimizer", "partition"],
        ),
    ],
)
def test_a_lack_of_memory_outside_of_a_step_names_the_stage_and_can_be_mended(
    tmp_path: Path, what: str, device: int, stage: int | None, parts: list[str]
) -> None:
    said, *where, losses = on_devices(lacks, what, tmp_path)
    assert where == [device, stage]
    for part in (*parts, "Tried to allocate"):
        assert part in said, part
    if what == "checkpoint":  # with the state of two steps
        losses = losses[1:]
    assert losses == pytest.approx(plain()[-len(losses) :], rel=1e-6)
