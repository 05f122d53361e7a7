"""A model that is built on the meta device trains as the same model built with data.

A rank allocates what its own stages have. The reference is the same model, built on the CPU in one
process after the same seed.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples import larger
from examples.larger import WEIGHTS
from fxpipe.compiler import options
from tests.helpers.hollow import (
    CUTS,
    SEED,
    Layers,
    assert_same,
    compiled,
    trained,
    with_data,
    without_data,
)
from tests.helpers.profiles import deep
from tests.helpers.ranks import DeviceMesh, on_ranks


def reset_and_train(mesh: DeviceMesh, whole: int) -> dict[str, Any]:
    options.WHOLE = whole
    model = without_data()
    pipe = compiled(mesh, model)
    torch.manual_seed(SEED + mesh.get_rank())  # rank 0's counts
    pipe.reset_parameters()
    made = trained(pipe)
    made["with data"] = {
        name
        for name, p in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        if not p.is_meta
    }
    pipe.close()
    return made


@pytest.mark.smoke
@pytest.mark.parametrize("whole", [0, *deep(options.WHOLE)])
def test_each_rank_draws_the_values_of_the_whole_model_and_keeps_its_own(whole: int) -> None:
    with compiled(2, with_data()) as pipe:
        expected = trained(pipe)
    ranks = on_ranks(2, reset_and_train, whole)
    names: set[str] = set()
    for found in ranks:
        assert_same(found, expected)
        assert found["with data"] == set(found["state"])
        assert not names & set(found["state"])
        names |= set(found["state"])
    assert names == set(expected["state"])


def load_and_train(mesh: DeviceMesh, folder: str, values: dict[str, Tensor]) -> dict[str, Any]:
    pipe = compiled(mesh, without_data(), partition=CUTS[: mesh.size() - 1])
    if values:
        given = {name: value for name, value in values.items() if name in pipe.state_dict()}
        pipe.load_state_dict(given if mesh.get_rank() else values)
    else:
        pipe.load(folder)
    made = trained(pipe)
    pipe.close()
    return made


@pytest.mark.parametrize(("size", "form"), [*deep((4, "folder")), (2, "state dict")])
def test_each_rank_loads_its_own_part(size: int, form: str, tmp_path: Path) -> None:
    with compiled(2, with_data()) as pipe:
        pipe.save(tmp_path / "run")
        values = {name: value.clone() for name, value in pipe.state_dict().items()}
        expected = trained(pipe)
    ranks = on_ranks(
        size, load_and_train, str(tmp_path / "run"), values if form != "folder" else {}
    )
    for found in ranks:
        assert_same(found, expected)
    assert sum(len(found["state"]) for found in ranks) == len(expected["state"])


def train_within_a_limit(mesh: DeviceMesh, limit: float) -> tuple[list[float], int]:
    compiled(
        mesh, Layers(), partition=CUTS[: mesh.size() - 1]
    ).close()  # what is imported late is not limited
    ctypes.CDLL(None).malloc_trim(0)  # else what is free of the heap is allocated beyond the limit
    larger.limit_memory(int(limit * WEIGHTS))
    # threads of the pipe above may end later than it closes, and give their stacks back
    rest = resource.getrlimit(resource.RLIMIT_AS)[0] - larger.address_space()
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(rest + int(0.05 * WEIGHTS), dtype=torch.uint8)
    return larger.train(mesh, steps=3)


@pytest.mark.deep
@pytest.mark.parametrize(("size", "limit"), [(4, 0.95), (2, 1.8)])
def test_a_model_larger_than_a_process_trains_over_ranks(size: int, limit: float) -> None:
    """Training half of it takes 1.5 times its weights: no one of four ranks could do that."""
    ranks = on_ranks(size, train_within_a_limit, limit)
    assert sum(own for _, own in ranks) == WEIGHTS
    assert 3 * max(own for _, own in ranks) < limit * WEIGHTS
    torch.manual_seed(0)
    h = x = torch.ones(8, larger.WIDTH)
    with torch.no_grad():
        for _ in range(larger.DEPTH):  # one layer at a time
            h = F.relu(nn.Linear(larger.WIDTH, larger.WIDTH)(h))
    losses, _ = ranks[0]
    assert losses[0] == pytest.approx(float(F.mse_loss(h, x)), rel=1e-5)
    assert losses == sorted(set(losses), reverse=True)
    assert all(found == losses for found, _ in ranks)
