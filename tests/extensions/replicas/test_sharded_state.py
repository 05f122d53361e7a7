"""The state of sharded optimizers: in checkpoints, after a failure, and of a model without data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fxpipe
from tests.extensions.ranks.test_replicas import (
    OPTIMIZERS,
    Model,
    Results,
    assert_equal,
    batch,
    looped,
    made,
    pipe_of,
)
from tests.extensions.ranks.test_replicas_together import breaking, go_on
from tests.extensions.replicas.test_sharded import state_bytes
from tests.helpers.one_optimizer import made_by
from tests.helpers.ranks import DeviceMesh, on_ranks, shared_folder

pytestmark = pytest.mark.usefixtures("one_thread")


def whole(named_parameters: Any) -> torch.optim.Optimizer:
    """One optimizer of the whole model."""
    return torch.optim.AdamW([{"params": [p]} for _, p in named_parameters], lr=0.01)


def given(schedule: str) -> Any:
    return OPTIMIZERS["adamw"] if schedule == "2bw" else whole


def continued(
    mesh: DeviceMesh | int,
    load: Path | None,
    save: Path | None,
    steps: tuple[int, int],
    shards: bool,
    schedule: str,
) -> Any:
    """The state after some steps, from one checkpoint and to another."""
    assert isinstance(mesh, DeviceMesh)
    replica = mesh["dp"].get_local_rank()
    with pipe_of(mesh, schedule=schedule, shards=shards, optimizer=given(schedule)) as pipe:
        if schedule == "2bw":  # else the state waits until there are stages
            x, y = batch(0, replica)
            pipe.prepare(x, target=y)
        return go_on(pipe, replica, load, save, steps)


@pytest.mark.smoke
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_checkpoints_go_from_sharded_optimizers_to_whole_ones_and_back(
    tmp_path: Path, schedule: str
) -> None:
    one, two, three = (tmp_path / name for name in "abc")
    on_ranks(4, continued, None, one, (0, 2), True, schedule, replicas=2)
    on_ranks(2, continued, one, two, (2, 3), False, schedule, replicas=2)
    ranks = on_ranks(2, continued, two, three, (3, 5), True, schedule, replicas=2)
    expected = looped(2, "adamw", 5, schedule=schedule)
    assert_equal(ranks[1], {key: expected[key] for key in ranks[1]}, schedule)
    with fxpipe.compile(
        Model(), 1, loss=F.mse_loss, schedule=schedule, optimizer=given(schedule)
    ) as pipe:
        x, y = batch(0, 0)
        pipe.prepare(x, target=y)
        pipe.load(three)
        assert pipe.batches == 5
        assert state_bytes(pipe) == 2 * 4 * sum(p.numel() for p in pipe.parameters())
        assert_equal(pipe.state_dict(), ranks[0], schedule)


def looked_at(mesh: DeviceMesh, folder: Path) -> list[Results]:
    """The states of a run that looks at its optimizer, and of one that goes on from its folder,
    which looks before it loads."""
    replica, found = mesh["dp"].get_local_rank(), []
    for load, save, steps in ((None, folder, (0, 3)), (folder, None, (3, 5))):
        with pipe_of(mesh, shards=True) as pipe:
            x, y = batch(0, replica)
            pipe.prepare(x, target=y)
            assert [group["lr"] for group in pipe.optimizer.param_groups] == [0.01]
            found.append(go_on(pipe, replica, load, save, steps))
    return found


def test_looking_at_the_optimizer_changes_nothing_of_a_checkpoint(tmp_path: Path) -> None:
    for found in on_ranks(2, looked_at, tmp_path / "run", replicas=2):
        for steps, state in zip((3, 5), found, strict=True):
            expected = looped(2, "adamw", steps)
            assert_equal(state, {key: expected[key] for key in state}, str(steps))


def failing(mesh: DeviceMesh) -> dict[str, Any]:
    """What is left after an optimizer has failed on one rank."""
    replica, device = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    found: dict[str, Any] = {}
    for schedule, shards in (("1f1b", True), ("2bw", False), ("2bw", True)):
        breaks = False
        optimizer = breaking(lambda: breaks and (replica, device) == (1, 1))  # noqa: B023
        with pipe_of(mesh, schedule=schedule, optimizer=optimizer, shards=shards) as pipe:
            for step in range(3):
                x, y = batch(step, replica)
                pipe.step(x, target=y)
            pipe.flush()
            pipe.save(shared_folder() / "checkpoint")
            weights = pipe.state_dict(full=True)
            breaks = True
            with pytest.raises(fxpipe.ExecutionError, match=r"here"):
                pipe.step(*batch(3, replica)[:1], target=batch(3, replica)[1])
                pipe.flush()
            breaks = False
            with pytest.raises(fxpipe.EndedError, match="earlier call: "):
                pipe.state_dict(full=True)
            pipe.load(shared_folder() / "checkpoint")
            assert pipe.batches == 3
            assert_equal(pipe.state_dict(full=True), weights, schedule)
            for step in range(3, 5):
                x, y = batch(step, replica)
                pipe.step(x, target=y)
            pipe.flush()
            found[f"{schedule} {shards}"] = pipe.state_dict(full=True)
    return found


def test_after_an_optimizer_fails_on_one_rank_all_ranks_go_on_from_a_checkpoint() -> None:
    ranks = on_ranks(4, failing, replicas=2)
    for found in ranks:
        expected = looped(2, "sgd", 5)
        own = found["1f1b True"]
        assert_equal(own, {key: expected[key] for key in own}, "1f1b")
        assert_equal(found["2bw True"], ranks[0]["2bw False"], "2bw")


def hollow(mesh: DeviceMesh, folder: Path) -> list[Results]:
    """The states of a model that was built on the meta device and gets its values later."""
    replica, found = mesh.get_local_rank("dp"), []
    for load in (False, True):
        with torch.device("meta"):
            model = Model()
        x, y = batch(0, replica)
        with fxpipe.compile(
            model,
            mesh,
            loss=F.mse_loss,
            microbatches=4,
            schedule="2bw",
            optimizer=OPTIMIZERS["adamw"],
            extensions=[fxpipe.Replicas(shard_optimizer=True)],
            partition=["third"],
            example=((x,), {"target": y}),
        ) as pipe:
            assert any(made_by(pipe))  # are made before there are values
            if load:
                pipe.load(folder)
            else:
                pipe.load_state_dict(made().state_dict())
            for step in range(pipe.batches, 3):
                x, y = batch(step, replica)
                pipe.step(x, target=y)
            pipe.flush()
            if not load:
                pipe.save(folder)
                for step in range(3, 5):
                    x, y = batch(step, replica)
                    pipe.step(x, target=y)
                pipe.flush()
            found.append(pipe.state_dict())
    return found


def test_a_model_gets_its_values_after_its_optimizers_are_made(tmp_path: Path) -> None:
    for found in on_ranks(4, hollow, tmp_path / "run", replicas=2):
        for steps, state in zip((5, 3), found, strict=True):
            expected = looped(2, "adamw", steps, schedule="2bw")
            assert_equal(state, {key: expected[key] for key in state}, str(steps))
