"""Stages with copies on other ranks: equal to a loop that sums in the same parts; a rank that fails
or dies is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import ExecutionError
from fxpipe.extensions.copies.opcodes import Add, Give, Share
from fxpipe.ir.recipe import find_recipe
from tests.extensions.copies.test_copies import copied
from tests.extensions.ranks.test_lost_ranks import survivors, told_of
from tests.helpers.failing import at, die, fail, fails, first_of_each_kind, unchanged
from tests.helpers.overlapping import ADAMW, make
from tests.helpers.profiles import DEEP
from tests.helpers.ranks import DeviceMesh, on_ranks
from tests.helpers.tiny import Snapshot, within
from tests.oracles import loop
from tests.oracles.copied_loop import CopiedLoop
from tests.oracles.delayed_loop import MSE


def compiled(mesh: DeviceMesh, model: nn.Sequential, **options: Any) -> fxpipe.Pipeline:
    """A pipe of layers that are cut evenly, whose stages have copies."""
    cuts = [str(rank * len(model) // mesh.size()) for rank in range(1, mesh.size())]
    chosen: dict[str, Any] = {"schedule": "chimera", "microbatches": 4, "partition": cuts}
    return fxpipe.compile(model, mesh, loss=MSE, optimizer=ADAMW, **{**chosen, **options})


def both(mesh: DeviceMesh, clip: float | None = None) -> tuple[fxpipe.Pipeline, CopiedLoop]:
    """A pipe on ranks, and the loop."""
    model = layers()
    alone = copied(model, find_recipe("chimera")(mesh.size(), 4), ADAMW)
    alone.clip = clip
    return compiled(mesh, model, clip_norm=clip), alone


def layers() -> nn.Sequential:
    model, _ = make("mlp", 1, 8)
    assert isinstance(model, nn.Sequential)
    return model


def equal(pipe: fxpipe.Pipeline, alone: CopiedLoop) -> None:
    loop.assert_same(pipe.state_dict(full=True), alone.model.state_dict())


def trained(mesh: DeviceMesh, folder: str) -> set[str]:
    """Steps and a checkpoint, from which a model without data goes on."""
    _, data = make("mlp", 4, 8)
    pipe, alone = both(mesh, 0.05)
    with pipe:
        for x, y in data[:2]:
            assert torch.equal(pipe.step(x, target=y), alone.step(x, y))
        equal(pipe, alone)
        pipe.save(folder)
        pipe.step(data[2][0], target=data[2][1])
    hollow = layers().to("meta")
    with compiled(mesh, hollow, clip_norm=0.05) as pipe:
        pipe.prepare(data[2][0], target=data[2][1])
        pipe.load(folder)
        for x, y in data[2:]:
            assert torch.equal(pipe.step(x, target=y), alone.step(x, y))
        equal(pipe, alone)
        held = (*hollow.named_parameters(), *hollow.named_buffers())
        real = {name for name, value in held if not value.is_meta}
        assert real == set(pipe.state_dict()), "a copy of a stage has allocated something"
    return real


@pytest.mark.parametrize("size", [2, 4] if DEEP else [2])
def test_copies_on_ranks_train_as_a_loop_and_have_no_weights_of_their_own(
    size: int, tmp_path: Path
) -> None:
    names = on_ranks(size, trained, str(tmp_path / "run"))
    assert sum(map(len, names)) == len(set[str]().union(*names)) == 12


def failing(mesh: DeviceMesh, folder: str) -> set[str]:
    """Let each kind of instruction fail on each rank in turn; at last a rank is killed."""
    here, kinds = mesh.get_local_rank(), set[str]()
    pipe, alone = both(mesh)
    _, [(x, y)] = make("mlp", 1, 8)
    assert torch.equal(pipe.step(x, target=y), alone.step(x, y))
    told = [each for each in first_of_each_kind(pipe) if isinstance(each[2], Share | Give | Add)]
    for rank, position, instruction in told:
        before = Snapshot.of(pipe)
        with (
            within(5),
            at(position if rank == here else -1, fail),
            pytest.raises(ExecutionError) as raised,
        ):
            pipe.step(x, target=y)
        fails(rank, raised.value, instruction, rank == here)
        unchanged(before, pipe, str(instruction))
        assert torch.equal(pipe.step(x, target=y), alone.step(x, y))
        equal(pipe, alone)
        kinds.add(type(instruction).__name__)
    position = next(at for rank, at, x in told if rank == 1 and isinstance(x, Give))
    if here == 1:
        with at(position, die):
            pipe.step(x, target=y)
    with told_of(1):
        pipe.step(x, target=y)
    pipe.close()
    return kinds


@pytest.mark.skipif(os.name != "posix", reason="processes are killed as POSIX does")
def test_a_rank_that_fails_or_dies_between_copies_is_named_on_the_others() -> None:
    assert survivors(2, {1}, failing) == [{"Share", "Give", "Add"}]
