"""Models without data, from the meta device, over simulated devices of one process and of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import fxpipe
from fxpipe.compiler import options
from tests.helpers.hollow import (
    SEED,
    assert_same,
    batch,
    compiled,
    trained,
    with_data,
    without_data,
)
from tests.helpers.profiles import deep
from tests.simcuda.process import on_devices, simulated
from tests.simcuda.ranks import on_devices_of_ranks
from tests.simcuda.test_memory import Optimizer, as_trained, limit_of, lives, on_eight

pytestmark = simulated

PLACES = ["cuda:0", "cuda:1"]


def on_host(found: dict[str, Any]) -> dict[str, Any]:
    state = {name: value.cpu() for name, value in found["state"].items()}
    return {**found, "output": found["output"].cpu(), "state": state}


def from_data(folder: Path) -> dict[str, Any]:
    """What the same model with data gives, whose first state is saved."""
    with compiled(PLACES, with_data()) as pipe:
        pipe.save(folder / "run")
        torch.save({name: value.cpu() for name, value in pipe.state_dict().items()}, folder / "pt")
        return on_host(trained(pipe))


def fill(pipe: fxpipe.Pipeline, folder: Path, way: str) -> None:
    if way == "drawn":
        torch.manual_seed(SEED)
        pipe.reset_parameters()
    elif way == "folder":
        pipe.load(folder / "run")
    else:
        pipe.load_state_dict(torch.load(folder / "pt", mmap=True))


def filled(folder: Path, way: str, whole: int) -> None:
    """Train a model that gets its values in one of these ways; each is where its stage runs."""
    options.WHOLE = whole
    expected = from_data(folder)
    model = without_data()
    with compiled(PLACES, model) as pipe:
        assert all(tensor.is_meta for tensor in model.parameters())
        with pytest.raises(fxpipe.InputError, match="has no data"):
            pipe.step(batch()[0], target=batch()[1])
        fill(pipe, folder, way)
        if way != "drawn":  # these are drawn on the host
            assert all(tensor.is_cuda for tensor in model.parameters())
        assert_same(on_host(trained(pipe)), expected)
        for stage in pipe.plan.stages:
            for argument in stage.parameters:
                home = torch.device("cuda", stage.index)
                assert model.get_parameter(argument.target).device == home


@pytest.mark.parametrize(
    ("way", "whole"),
    [
        ("drawn", 0),
        ("mapped", options.WHOLE),
        *deep(("drawn", options.WHOLE), ("folder", 0), ("folder", options.WHOLE), ("mapped", 0)),
    ],
)
def test_a_model_without_data_trains_over_the_devices_of_a_process(
    tmp_path: Path, way: str, whole: int
) -> None:
    on_devices(filled, tmp_path, way, whole)


def over_ranks(mesh: DeviceMesh, folder: Path, way: str) -> dict[str, Any]:
    with compiled(mesh, without_data()) as pipe:
        fill(pipe, folder, way)
        return on_host(trained(pipe))


@pytest.mark.deep
@pytest.mark.parametrize("way", ["drawn", "folder"])
def test_a_model_without_data_trains_over_ranks_with_devices(tmp_path: Path, way: str) -> None:
    expected = on_devices(from_data, tmp_path)
    for found in on_devices_of_ranks(2, over_ranks, tmp_path, way):
        assert_same(found, expected)


def draw(pipe: fxpipe.Pipeline) -> None:
    torch.manual_seed(0)
    pipe.reset_parameters()


@on_eight
@pytest.mark.deep
def test_a_model_without_data_of_many_devices_memory_lives_on_these_devices(
    tmp_path: Path, optimizer: Optimizer, copies: float, devices: int
) -> None:
    args = tmp_path, optimizer, limit_of(copies, devices), devices
    as_trained(on_devices(lives, None, *args, draw, devices=devices), 4)


@on_eight
@pytest.mark.deep
def test_a_model_without_data_of_many_devices_memory_lives_over_as_many_ranks(
    tmp_path: Path, optimizer: Optimizer, copies: float, devices: int
) -> None:
    args = tmp_path, optimizer, limit_of(copies, devices), devices
    for losses in on_devices_of_ranks(devices, lives, *args, draw):
        as_trained(losses, 3)
