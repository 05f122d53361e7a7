"""Replicas whose ranks have a simulated device each: their sums are collectives, as by NCCL."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.extensions.ranks.test_replicas import CASES, Results, assert_equal, looped, trained
from tests.helpers.profiles import DEEP
from tests.simcuda.process import on_devices, simulated
from tests.simcuda.ranks import on_devices_of_ranks

pytestmark = simulated

LAZY, RANDOM, STARVING = 1, 2, 3

ORDERS = (LAZY, RANDOM, STARVING)

SEED = int(os.environ.get("FXPIPE_SEED", random.SystemRandom().randrange(10**6)))
"""It changes from run to run: every message names it, and ``FXPIPE_SEED`` sets it."""

STEPS = 4

SHAPES: Mapping[tuple[int, int], Sequence[tuple[str, bool]]] = {
    (2, 2): [("clipped, 2bw", True)],
}
"""Replicas and devices → cases, each with whether its optimizers are sharded."""

if DEEP:
    every = [(name, shards) for name in CASES for shards in (False, True)]
    SHAPES = {
        (2, 2): every,
        (3, 1): [("2bw", False), ("1f1b", True), ("clipped", True)],
        (4, 1): [("2bw", False)],
    }


def run_cases(
    mesh: DeviceMesh, cases: Sequence[tuple[str, bool]], in_order: bool, seed: int
) -> list[Results]:
    """What each case gives, with other orders of what streams run on each rank."""
    from tests.simcuda import cuda

    results = []
    for number, (name, shards) in enumerate(cases):
        mode = ORDERS[(number + mesh.get_rank()) % len(ORDERS)]
        cuda.configure(cuda.Mode(mode), seed + number)
        options: dict[str, Any] = {"in_order": in_order, "shards": shards, "steps": STEPS}
        found = trained(mesh, **options, **CASES[name])
        races = cuda.take().races
        assert not races, f"{name} in mode {mode} with seed {seed}: {races[0]}"
        results.append({key: value.cpu() for key, value in found.items()})
    return results


def run_loops(replicas: int, cases: Sequence[tuple[str, bool]]) -> list[Results]:
    """The same in plain loops on the CPU."""
    return [looped(replicas, steps=STEPS, **CASES[name]) for name, _ in cases]


@pytest.mark.smoke
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_in_the_order_of_the_replicas_have_the_bits_of_loops(shape: tuple[int, int]) -> None:
    replicas, devices = shape
    cases = SHAPES[shape]
    loops = on_devices(run_loops, replicas, cases)
    size = replicas * devices
    ranks = on_devices_of_ranks(size, run_cases, cases, True, SEED, replicas=replicas)
    print(f"FXPIPE_SEED={SEED}")  # shown if a value differs
    for index, (name, _) in enumerate(cases):
        for found in ranks:
            assert_equal(found[index], loops[index], name)


def test_sums_by_the_backend_are_alike_in_all_replicas_and_near_those_of_loops() -> None:
    """From three replicas on the order shows."""
    cases = [("1f1b", False), ("clipped", True)]
    loops = on_devices(run_loops, 3, cases)
    first, *others = on_devices_of_ranks(3, run_cases, cases, False, SEED, replicas=3)
    for index, (name, _) in enumerate(cases):
        differs = False
        for key, value in loops[index].items():
            torch.testing.assert_close(first[index][key], value)
            differs |= not torch.equal(first[index][key], value)
        assert differs, f"{name} adds in the order of the replicas"
        for found in others:
            assert_equal(found[index], first[index], name)
