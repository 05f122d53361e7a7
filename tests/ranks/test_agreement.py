"""Ranks notice that they were given something else, before anything is computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpipe
from tests.helpers.ranks import DeviceMesh, on_ranks


def train(mesh: DeviceMesh) -> list[str]:
    """What a rank is told where it is given other inputs, and then where all have the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    told = []
    x = torch.randn(4, 4)
    with fxpipe.compile(model, mesh, microbatches=2, loss=F.mse_loss, partition=["2"]) as pipe:
        with pytest.raises(fxpipe.RankError) as caught:
            pipe.step(x + mesh.get_local_rank(), target=x[:, :2])
        told.append(str(caught.value))
        told.append(str(pipe.step(x, target=x[:, :2])))
    return told


def test_other_inputs_on_one_rank_are_an_error_on_all() -> None:
    first, second = on_ranks(2, train)
    for told in (first[0], second[0]):
        assert "the call differs between ranks" in told
        assert "'x: (4, 4)" in told or "'input: (4, 4)" in told
    assert first[1] == second[1]


def in_order(mesh: DeviceMesh, order: list[int]) -> tuple[int, list[str]]:
    """The stage that this rank runs, and what it trains, in a mesh of another order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    x = torch.ones(4, 4)
    other = DeviceMesh("cpu", order, mesh_dim_names=("pp",))
    with fxpipe.compile(
        model, other, microbatches=2, loss=F.mse_loss, partition=["1", "2"]
    ) as pipe:
        pipe.step(x, target=x[:, :2])
        return mesh.get_local_rank(), sorted(pipe.state_dict())


def test_stages_are_on_the_ranks_in_the_order_of_the_mesh() -> None:
    found = dict(on_ranks(3, in_order, [2, 0, 1]))
    assert found == {
        2: ["0.bias", "0.weight"],
        0: ["1.bias", "1.weight"],
        1: ["2.bias", "2.weight"],
    }
