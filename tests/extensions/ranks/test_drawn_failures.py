"""Failures of all kinds at drawn instructions of drawn ranks: every rank is told rightly and soon,
weights are as before or come from the checkpoint, and training gives the bits of plain loops."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fxpipe
from fxpipe.ir.recipe import find_recipe
from tests.extensions.ranks.test_replicas import OPTIMIZERS, assert_equal, batch, looped, made
from tests.helpers.failing import at, fail, fails
from tests.helpers.profiles import DEEP
from tests.helpers.ranks import DeviceMesh, on_ranks, shared_folder
from tests.helpers.tiny import within

pytestmark = pytest.mark.usefixtures("one_thread")

CASES: list[dict[str, Any]] = [
    {"schedule": "1f1b", "clip_norm": 0.05},
    {"schedule": "zb-h1", "recompute": "always"},
    {"schedule": "looped-bfs"},
    {"schedule": "1f1b", "extensions": [fxpipe.Offload()]},
]
SHARED: list[dict[str, Any]] = [
    {"extensions": [fxpipe.Replicas(bucket_cap_mb=1e-4)], "schedule": "zb-h1"},
    {"extensions": [fxpipe.Replicas(shard_optimizer=True)], "clip_norm": 0.05},
    {"extensions": [fxpipe.Sharding("zero2", bucket_cap_mb=1e-4)]},
    {"extensions": [fxpipe.Sharding("zero3")], "schedule": "looped-bfs", "clip_norm": 0.05},
]
KINDS = "fails", "fails", "fails", "has no memory", "is late", "gives another batch", "two fail"
EVERY = 2 if not DEEP else 50
EVERY_SHARED = 2 if not DEEP else 15


def lack() -> None:
    raise MemoryError("told to fail")


def failing(mesh: DeviceMesh, cases: list[dict[str, Any]], every: int) -> Counter[str]:
    """Train, with so many failures in each case, and compare. Returns how many of each kind."""
    here, told = mesh.get_rank(), Counter[str]()
    replica = mesh["dp"].get_local_rank() if mesh.ndim > 1 else 0
    for number, case in enumerate(cases):
        draw, folder = random.Random(number), shared_folder() / f"run {number}"
        devices = mesh["pp"].size()
        cuts: Any = {2: ["third"], 4: ["second", "third", "fourth"]}
        options: dict[str, Any] = {"schedule": "1f1b", "optimizer": OPTIMIZERS["adamw"], **case}
        options["partition"] = cuts[find_recipe(options["schedule"]).stages(devices)]
        found: dict[str, Any] = {}
        with fxpipe.compile(made(), mesh, microbatches=4, loss=F.mse_loss, **options) as pipe:
            for step in range(every + 1):
                x, y = batch(step, replica)
                if step:
                    pipe.save(folder)
                    before = {name: value.clone() for name, value in pipe.state_dict().items()}
                    kind, ranks = draw.choice(KINDS), draw.sample(range(mesh.size()), 2)
                    places = [draw.randrange(len(pipe.program.lists[r % devices])) for r in ranks]
                    told[kind] += 1
                    where = f"{case}: {kind} at {places} of {ranks}"
                    if once(pipe, kind, ranks, places, here, devices, x, y, where):
                        pipe.load(folder)
                    assert_equal(dict(pipe.state_dict()), before, where)
                found[f"loss {step}"] = pipe.step(x, target=y).clone()
            found |= pipe.state_dict(full=True)
        replicas = mesh.size() // devices
        clip = case.get("clip_norm")
        assert_equal(found, looped(replicas, "adamw", every + 1, clip_norm=clip), str(case))
    return told


def once(
    pipe: fxpipe.Pipeline,
    kind: str,
    ranks: list[int],
    places: list[int],
    here: int,
    devices: int,
    x: torch.Tensor,
    y: torch.Tensor,
    where: str,
) -> bool:
    """One step in which a rank, or two of them, do something else. Returns whether weights have to
    come from the checkpoint."""
    failing = ranks if kind == "two fail" else ranks[:1]
    own = places[ranks.index(here)] if here in failing else -1
    if kind == "is late":
        with within(20), at(own, lambda: time.sleep(0.1)):
            pipe.step(x, target=y)
        return True
    if kind == "gives another batch":
        rows = len(x) - 1 if here in failing else len(x)
        with within(20), pytest.raises(fxpipe.RankError, match="differs between ranks"):
            pipe.step(x[:rows], target=y[:rows])
        return False
    caught: Any = None
    with within(20), at(own, lack if kind == "has no memory" else fail):
        try:
            pipe.step(x, target=y)
        except fxpipe.ExecutionError as error:
            caught = error
    assert caught is not None, where
    if kind == "fails":
        (rank,) = failing
        instruction = pipe.program.lists[rank % devices][places[0]]
        assert caught.device == rank % devices, where
        if pipe.program.replicas == 1:
            fails(rank, caught, instruction, rank == here)
    assert "told to fail" in str(caught), where
    return "so the pipe has ended" in f"{caught}{caught.__notes__}"


def test_after_drawn_failures_of_all_kinds_losses_and_weights_have_their_bits() -> None:
    for told in on_ranks(2, failing, CASES, EVERY):
        assert told.total() == len(CASES) * EVERY
        assert not DEEP or told.keys() == {*KINDS}


def test_so_they_have_over_replicas() -> None:
    for told in on_ranks(4, failing, SHARED, EVERY_SHARED, replicas=2):
        assert told.total() == len(SHARED) * EVERY_SHARED
