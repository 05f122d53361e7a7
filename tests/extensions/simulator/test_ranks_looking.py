"""What a pipe shows of itself on a rank: all ranks where it can, and the same on each."""

from __future__ import annotations

import gc
import socket
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpipe
from fxpipe.extensions.simulator import simulate
from fxpipe.ir import instruction as ins
from tests.helpers.one_optimizer import made_by
from tests.helpers.profiles import deep
from tests.helpers.ranks import DeviceMesh, on_ranks

pytestmark = pytest.mark.models

HOUR = 3600 * 10**9
CLOCKS = [
    f"fxpipe.{module}.perf_counter_ns"
    for module in ("runtime.interpreter", "extensions.ranks.agreement")
]

COSTS = {"F": 1, "B": 2, "U": 1}


def batch() -> torch.Tensor:
    return torch.ones(8, 16)


def pipe_of(devices: DeviceMesh | int, **options: Any) -> fxpipe.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    defaults: dict[str, Any] = {
        "partition": ["2"],
        "microbatches": 4,
        "loss": F.mse_loss,
        "optimizer": torch.optim.AdamW,
        "example": ((batch(),), {"target": batch()}),
    }
    return fxpipe.compile(model, devices, **{**defaults, **options})


def peaks(pipe: fxpipe.Pipeline) -> list[tuple[float, float]]:
    """Device → the most bytes that it holds at once, where one value from each other device may
    arrive ahead, as over ranks; and those that it always holds."""
    found = pipe.simulate(COSTS)
    assert found.sizes is not None
    early = simulate(pipe.program, COSTS, sizes=replace(found.sizes, early=1))
    if pipe._group.size > 1:
        assert found.memory == early.memory
    return [(each.peak, each.resting) for each in early.memory]


def shown(devices: DeviceMesh | int, **options: Any) -> dict[str, Any]:
    """What there is to see after two steps and a profile, as plain values."""
    with pipe_of(devices, **options) as pipe:
        before = peaks(pipe)
        for _ in range(2):
            pipe.step(batch(), target=batch())
        early = pipe.weight_versions
        measured = pipe.profile(batch(), target=batch())  # flushes at its end
        found: dict[str, Any] = {
            "before": before,
            "early": early,
            "versions": pipe.weight_versions,
            "bytes": pipe.weight_bytes,
            "table": repr(pipe),
            "pictures": [each.draw()._repr_svg_() for each in (pipe.program, pipe.plan, measured)],
            "held": peaks(pipe),
            "kept": dict(sorted(pipe.kept.items())),
            "measured": str(measured),
            "spans": [str(each) for each in measured.spans],
            "seconds": float(measured.makespan),
        }
        if pipe._engine.updates:
            found["optimizers"] = [each is not None for each in made_by(pipe)]
            one = pipe.optimizer.state_dict()
            found["numbers"] = [group["params"] for group in one["param_groups"]]
            found["state"] = {n: kept["exp_avg"].tolist() for n, kept in one["state"].items()}
    return found


def shown_late(mesh: DeviceMesh) -> dict[str, Any]:
    """The same, where the clock of the second rank is an hour ahead."""
    if mesh.get_local_rank() == 0:
        return shown(mesh)
    early, late = (patch(clock, lambda: time.perf_counter_ns() + HOUR) for clock in CLOCKS)
    with early, late:
        return shown(mesh)


def instructions(devices: DeviceMesh | int, schedule: str) -> tuple[int, str]:
    """How many instructions this process holds after a step, and the text of the program."""
    with pipe_of(devices, schedule=schedule, microbatches=8) as pipe:
        pipe.step(batch(), target=batch())
        pipe.flush()
        gc.collect()
        held = sum(isinstance(each, ins.Instruction) for each in gc.get_objects())
        return held, str(pipe.program)


def alone_on_one(mesh: DeviceMesh, schedule: str) -> list[str]:
    """What rank 0 looks at while the other does nothing; then both go on."""
    limited = fxpipe.Partition(memory_limits=10**9)
    with pipe_of(mesh, partition=limited, schedule=schedule) as pipe:
        pipe.step(batch(), target=batch())
        seen: list[str] = []
        if mesh.get_local_rank() == 0:
            seen = [repr(pipe), str(pipe.simulate()), str(pipe.plan), str(pipe.weight_versions)]
            if schedule == "1f1b":  # elsewhere these finish the batches in flight, on all ranks
                seen += [*pipe.state_dict()]
        pipe.step(batch(), target=batch())
        return [*seen, str(pipe.batches)]


def predicted(devices: DeviceMesh | int, schedule: str) -> dict[str, float]:
    """The seconds of a step as predicted after the first, after six, and after a profile; and with
    the times of tasks in that profile."""
    with pipe_of(devices, schedule=schedule) as pipe:
        predictions = []
        for _ in range(6):
            pipe.step(batch(), target=batch())
            predictions.append(pipe.simulate().step_time)
        ran = pipe.profile(batch(), target=batch(), steps=3)
        return {
            "before": predictions[0],
            "after": predictions[-1],
            "profiled": pipe.simulate().step_time,
            "ran": pipe.simulate(ran.costs).step_time,
        }


def several(devices: DeviceMesh | int) -> dict[str, dict[str, Any]]:
    return {
        "flushed": shown(devices),
        "overlapping": shown(devices, schedule="2bw"),
        "gradients": shown(devices, optimizer=None),
    }


@pytest.fixture(scope="module")
def found() -> tuple[list[dict[str, dict[str, Any]]], dict[str, dict[str, Any]]]:
    return on_ranks(2, several), several(2)


KINDS = pytest.mark.parametrize("kind", ["flushed", "overlapping", "gradients"])
Found = tuple[list[dict[str, dict[str, Any]]], dict[str, dict[str, Any]]]


@KINDS
def test_every_rank_predicts_what_one_process_predicts(found: Found, kind: str) -> None:
    ranks, alone = found
    for rank in ranks:
        for key in ("before", "held", "kept"):
            assert rank[kind][key] == alone[kind][key], key


@pytest.mark.parametrize("schedule", [*deep("1f1b"), "2bw"])
def test_a_rank_keeps_its_own_list_and_shows_those_of_all(schedule: str) -> None:
    _, text = instructions(2, schedule)
    lists = fxpipe.Program.parse(text).lists
    assert on_ranks(2, instructions, schedule) == [(len(own), text) for own in lists]


@KINDS
def test_a_profile_is_one_timeline_on_every_rank(found: Found, kind: str) -> None:
    first, second = (rank[kind] for rank in found[0])
    assert first["spans"] == second["spans"]
    assert first["measured"] == second["measured"]
    assert len(first["spans"]) == len(found[1][kind]["spans"])


@pytest.mark.parametrize(("schedule", "replicas"), [*deep(("1f1b", 2)), ("2bw", 1)])
def test_after_a_profile_every_rank_predicts_with_its_times(schedule: str, replicas: int) -> None:
    first, *others = on_ranks(2 * replicas, predicted, schedule, replicas=replicas)
    for key in ("before", "after", "profiled"):
        assert {each[key] for each in others} == {first[key]}, key
    assert first["ran"] == others[0]["ran"]  # of the same replica
    assert first["after"] == first["before"]
    assert first["profiled"] == first["ran"] != first["after"]


@KINDS
def test_pictures_are_the_same_on_every_rank(found: Found, kind: str) -> None:
    first, second = (rank[kind]["pictures"] for rank in found[0])
    assert first == second
    assert first[0] == found[1][kind]["pictures"][0]  # the others have measured times


def test_the_table_names_ranks_and_their_host_and_is_the_same_on_all(found: Found) -> None:
    first, second = (rank["flushed"]["table"] for rank in found[0])
    assert first == second
    assert f"\n0 on device 0 (rank 0, {socket.gethostname()}): " in first
    assert f"\n1 on device 1 (rank 1, {socket.gethostname()}): " in first
    assert "(cpu)" not in first


def test_a_rank_has_the_optimizers_of_its_own_stages(found: Found) -> None:
    assert [rank["flushed"]["optimizers"] for rank in found[0]] == [[True, False], [False, True]]


def test_the_one_optimizer_of_a_rank_has_all_groups_and_the_state_of_its_own_stages(
    found: Found,
) -> None:
    for kind in ("flushed", "overlapping"):
        alone = found[1][kind]
        ranks = [rank[kind] for rank in found[0]]
        assert [rank["numbers"] for rank in ranks] == [alone["numbers"]] * 2
        assert all(rank["state"] for rank in ranks)
        assert {**ranks[0]["state"], **ranks[1]["state"]} == alone["state"]


def test_a_rank_counts_the_versions_that_it_has(found: Found) -> None:
    alone = found[1]["overlapping"]
    for key in ("versions", "bytes"):
        first, second = alone[key]
        assert [rank["overlapping"][key] for rank in found[0]] == [[first, 0], [0, second]]
    early = [rank["overlapping"]["early"] for rank in found[0]]  # batches are in flight
    assert [early[0][1], early[1][0]] == [0, 0]


@pytest.mark.parametrize("schedule", [*deep("1f1b"), "2bw"])
def test_looking_waits_for_no_other_rank(schedule: str) -> None:
    seen, nothing = on_ranks(2, alone_on_one, schedule)
    assert seen[0].startswith(f"fxpipe.Pipeline of Sequential over 2 devices, {schedule}")
    assert len(seen) > 4
    assert [seen[-1]] == nothing == ["2"]


def test_clocks_that_differ_are_brought_together() -> None:
    for rank in on_ranks(2, shown_late):
        assert rank["seconds"] < HOUR / 10**9 / 2
