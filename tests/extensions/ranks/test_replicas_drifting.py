"""Replicas of which one alone gets other settings are told so."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpipe
from tests.helpers.profiles import deep
from tests.helpers.ranks import DeviceMesh, on_ranks

CHANGES = ("rate", "weights", "weights, without an optimizer")


def train(mesh: DeviceMesh, what: str, schedule: str, where: list[int]) -> tuple[str, float, float]:
    """What a rank is told in a step before which some replicas have changed something, how many
    batches count, and the sum of its weights."""
    replica = mesh.get_local_rank("dp")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    told = ""
    with fxpipe.compile(
        model,
        mesh,
        microbatches=2,
        schedule=schedule,
        loss=F.mse_loss,
        partition=["2"] if mesh["pp"].size() > 1 else [],
        optimizer=None if "without" in what else own,
    ) as pipe:
        for step in range(4):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + replica))
            if step == 2 and replica in where:
                pipe.flush()
                with torch.no_grad():
                    if what == "rate":
                        pipe.optimizer.param_groups[0]["lr"] = 0.5
                    else:
                        for parameter in model.parameters():
                            parameter.mul_(2)
            elif step == 2:
                pipe.flush()
            try:
                pipe.step(x, target=x[:, :2])
            except fxpipe.RankError as error:
                told = str(error)
                break
            if "without" in what:
                own.step()
                own.zero_grad()
        pipe.flush()
        weights = pipe.state_dict()
        total = sum(each.double().sum().item() for name, each in weights.items())
    return told, pipe.batches, total


@pytest.mark.parametrize(("schedule", "ranks"), [("gpipe", 2), *deep(("2bw", 4))])
def test_a_rate_that_one_replica_changes_is_an_error_in_all(schedule: str, ranks: int) -> None:
    for told, batches, _ in on_ranks(ranks, train, "rate", schedule, [1], replicas=2):
        assert "'lr of optimizer group 0: 0.1'" in told
        assert "'lr of optimizer group 0: 0.5'" in told
        assert batches == 2


@pytest.mark.parametrize("schedule", [*deep("gpipe"), "2bw"])
@pytest.mark.parametrize("what", CHANGES)
def test_what_all_replicas_change_alike_is_trained_with(what: str, schedule: str) -> None:
    if "without" in what and schedule == "2bw":
        pytest.skip("batches that overlap need an optimizer")
    first, second = on_ranks(2, train, what, schedule, [0, 1], replicas=2)
    assert first == second
    assert first[:2] == ("", 4)
