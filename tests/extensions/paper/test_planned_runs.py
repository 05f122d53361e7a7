"""The ways that a plan proposes go into ``compile`` as they are, and train as a plain loop does."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor.parallel import parallelize_module

import fxpipe
from fxpipe import Cluster, Device, Link
from fxpipe.extensions.paper.found import Ranking, Way
from tests.extensions.tensor_parallel.models import Llama, data, loss, made, near, plan_of
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.oracles.replicated_loop import ReplicatedLoop

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]

LAYERS = 6
STEPS = 2
SMALL = Device(
    flops=1e9,
    bandwidth=1e9,
    memory=1e9,
    host=1e9,
    link=Link(1e-6, 1e8),
    network=Link(1e-6, 1e8),
)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def planned(device: Device = SMALL, devices: int = 4, **options: Any) -> Ranking:
    with torch.device("meta"):
        model, tokens = Llama(LAYERS), torch.zeros(8, 6, dtype=torch.long)
    if options.get("tp", 1) > 1:
        options["tensors"] = {"layers.*.attention": "columns/rows", "layers.*.mlp": "columns/rows"}
    return fxpipe.plan(
        model,
        Cluster(device, devices),
        batch=8,
        example=((tokens,), {"target": tokens}),
        loss=loss,
        optimizer=optimizer,
        **options,
    )


def ways_of(*asked: dict[str, Any]) -> list[Way]:
    """The ways of some plans. With a ``share``, devices have that share of the memory that the best
    way takes that keeps all."""
    found: list[Way] = []
    for given in asked:
        options = dict(given)
        share, device = options.pop("share", 0), SMALL
        if share:
            most = planned(**{**options, "recompute": False})[0].memory
            device = replace(SMALL, memory=share * most)
        found += planned(device, **options)
    return found


def looped(replicas: int, microbatches: int, delay: int) -> dict[str, torch.Tensor]:
    """Losses and weights of plain loops in one process."""
    torch.manual_seed(0)
    model = made(layers=LAYERS)
    plain = ReplicatedLoop(
        model, optimizer(model.parameters()), loss, microbatches, lambda _: delay
    )
    x, y = (each.chunk(replicas) for each in data())
    found = {f"loss {step}": plain.step(x, y) for step in range(STEPS)}
    return found | copy.deepcopy(model.state_dict())


def trained(_: DeviceMesh, asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Losses and weights of each way, on this rank, which plans for itself."""
    found = []
    meshes: dict[str, DeviceMesh] = {}
    for way in ways_of(*asked):
        mesh = meshes.setdefault(str(way.layout), way.device_mesh("cpu"))
        model = made(layers=LAYERS)
        if way.layout.group > 1:
            parallelize_module(model, mesh["tp"], plan_of(LAYERS, ("attention", "mlp")))
        x, y = (each.chunk(way.layout.replicas) for each in data())
        replica = mesh["dp"].get_local_rank()
        with fxpipe.compile(model, mesh, **way.options) as pipe:
            seen: dict[str, Any] = {
                f"loss {step}": pipe.step(x[replica], target=y[replica]).clone()
                for step in range(STEPS)
            }
            pipe.flush()
            assert len(pipe.plan.stages) == len(way.begins) + 1
            kinds = pipe.schedule.kinds
            assert ("R" in kinds) == (way.recompute != "never")
            assert ("O" in kinds) == (way.offload != "never")
            found.append(seen | pipe.state_dict(full=True))
    return found


def assert_trains_as_the_loop(*asked: dict[str, Any], devices: int = 4) -> list[Way]:
    ways, every = ways_of(*asked), on_ranks(devices, trained, asked)
    for way, *found in zip(ways, *every, strict=True):
        delay = max(way.candidate.recipe(way.layout.stages, 4).delays)
        expected = looped(way.layout.replicas, way.candidate.microbatches, delay)
        for seen in found:
            near(seen, expected, str(way))
    return ways


def test_the_best_ways_over_replicas_and_stages_train_as_the_loop() -> None:
    ways = assert_trains_as_the_loop({"dp": 2, "keep": 3}, {"pp": 4, "keep": 3})
    assert len({way.candidate.recipe.name for way in ways}) > 3
    assert {way.sharding for way in ways} == {"never", "zero2"}


@pytest.mark.parametrize("stages", [1, 2])
def test_ways_with_tensor_parallelism_train_as_the_loop(stages: int) -> None:
    (layout,) = {
        way.layout for way in assert_trains_as_the_loop({"tp": 2, "pp": stages, "keep": 3})
    }
    assert layout.shape == {"dp": 2 // stages, "pp": stages, "tp": 2}


def test_ways_with_replicas_stages_and_tensor_parallelism_train_as_the_loop() -> None:
    asked = {"devices": 8, "dp": 2, "tp": 2, "keep": 2}
    (layout,) = {way.layout for way in assert_trains_as_the_loop(asked, devices=8)}
    assert layout.shape == {"dp": 2, "pp": 2, "tp": 2}


SETTINGS: Mapping[str, dict[str, Any]] = {
    "zero1": {"sharding": "zero1"},
    "zero3": {"sharding": "zero3"},
    "2bw": {"flush": False},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_replicas_share_and_delayed_weights_train_as_the_loop(name: str) -> None:
    ways = assert_trains_as_the_loop({"dp": 2, "keep": 2, **SETTINGS[name]})
    assert {way.sharding for way in ways} == {SETTINGS[name].get("sharding", "zero1")}


def test_ways_that_recompute_or_offload_train_as_the_loop() -> None:
    less = {"pp": 4, "keep": 3, "share": 0.6}
    ways = assert_trains_as_the_loop(less, {**less, "recompute": False, "offload": True})
    assert any(isinstance(way.recompute, dict) for way in ways)
    assert any(way.offload != "never" for way in ways)


EVERY: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "divided": {"tp": 2, "keep": 4},  # these take long to divide
    "delayed": {"flush": False},
    "away": {"share": 0.6, "offload": True},
}
"""What a plan is asked for, whose layouts it is free to choose."""


@pytest.mark.parametrize("name", EVERY)
def test_every_way_that_is_proposed_trains_as_the_loop(name: str) -> None:
    ways = assert_trains_as_the_loop(EVERY[name])
    assert len({str(way) for way in ways}) == len(ways) >= 3
