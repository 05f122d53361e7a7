"""Replicas whose weights or settings a user changes in one of them only are told so."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpipe
from tests.helpers.ranks import DeviceMesh, on_ranks

CHANGES = ("rate", "weights", "state dict", "weights, without an optimizer")


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
                    elif what == "state dict":
                        zeros = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
                        model.load_state_dict(zeros)
                    else:
                        for parameter in model.parameters():
                            parameter.mul_(2)
                        if what == "there and back":
                            for parameter in model.parameters():
                                parameter.div_(2)
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


@pytest.mark.parametrize("what", CHANGES)
def test_what_one_replica_changes_is_an_error_in_all(what: str) -> None:
    about = "'optimizer of stage 0: SGD, lr 0.1" if what == "rate" else "what replicas train"
    for told, batches, _ in on_ranks(2, train, what, "gpipe", [1], replicas=2):
        assert about in told
        assert batches == 2


@pytest.mark.parametrize("what", ["rate", "weights"])
def test_what_one_replica_changes_between_batches_that_overlap_is_an_error_in_all(
    what: str,
) -> None:
    about = "'optimizer of stage 0: SGD, lr 0.1" if what == "rate" else "what replicas train"
    for told, batches, _ in on_ranks(4, train, what, "2bw", [1], replicas=2):
        assert about in told or "'optimizer of stage 1: SGD, lr 0.1" in told
        assert batches == 2


@pytest.mark.parametrize("schedule", ["gpipe", "2bw"])
@pytest.mark.parametrize(
    ("what", "where"), [*((what, [0, 1]) for what in CHANGES), ("there and back", [1])]
)
def test_what_all_replicas_change_alike_is_trained_with(
    what: str, where: list[int], schedule: str
) -> None:
    if "without" in what and schedule == "2bw":
        pytest.skip("batches that overlap need an optimizer")
    first, second = on_ranks(2, train, what, schedule, where, replicas=2)
    assert first == second
    assert first[:2] == ("", 4)
