"""Ranks that are killed are replaced while the others stay, and training ends as if none had."""

from __future__ import annotations

import os
import random
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fxpipe
from examples import train_ranks
from examples.rejoin_ranks import launch, take_part
from fxpipe.extensions.checkpoint import folder as checkpoint_folder
from tests.helpers.checkpoints import same
from tests.helpers.ranks import CONTEXT

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are killed as POSIX does")

EVERY = 2
"""Batches between two checkpoints."""

tcp: Any = dist.TCPStore  # type: ignore[attr-defined,unused-ignore]


def drawn(kills: int) -> dict[int, tuple[int, float]]:
    """Batch → the rank that is killed in it or a little later, and how many seconds later."""
    draw = random.Random(kills)
    return {2 * kill + 1: (draw.randrange(2), draw.uniform(0, 0.03)) for kill in range(kills)}


def part(rank: int, port: int, *, folder: Path, kills: int) -> None:
    """Train as one of two ranks, which kills itself as drawn, once for each batch."""
    made, dying = train_ranks.batch, drawn(kills)

    def batch(number: int) -> Any:
        victim, after = dying.get(number, (-1, 0.0))
        if victim == rank:
            try:
                (folder / f"kill-{number}").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.system(f"(sleep {after}; kill -9 {os.getpid()}) &")
        return made(number)

    train_ranks.batch = batch
    (folder / f"process-{os.getpid()}").touch()
    take_part(
        rank,
        port,
        folder=str(folder / "checkpoint"),
        steps=2 * kills + 5,
        every=EVERY,
        processes=2,
    )


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.deep)])
def test_training_whose_ranks_are_killed_and_replaced_ends_with_the_same_weights(
    kills: int, tmp_path: Path
) -> None:
    replaced = launch(partial(part, folder=tmp_path, kills=kills), 2, kills, CONTEXT)
    assert replaced == kills
    assert len([*tmp_path.glob("process-*")]) == 2 + kills  # whoever was not killed has stayed
    train_ranks.train(str(tmp_path / "whole"), 2 * kills + 5, EVERY, 1)
    killed, whole = (checkpoint_folder.read(tmp_path / name) for name in ("checkpoint", "whole"))
    assert same(killed.parameters, whole.parameters)
    assert killed.optimizer is not None and whole.optimizer is not None
    for name, own in whole.optimizer.parameters.items():
        assert same(killed.optimizer.parameters[name].state, own.state), name


@pytest.mark.deep
def test_a_rank_that_nobody_replaces_is_named_after_the_timeout() -> None:
    store = tcp("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(fxpipe.RankError, match="rank 1 has not come") as raised:
        fxpipe.rejoin(store, 0, 2, timeout=timedelta(seconds=0.2))
    assert raised.value.rank == 1


@pytest.mark.deep
def test_a_process_whose_place_another_has_taken_is_refused() -> None:
    store = tcp("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mesh = fxpipe.rejoin(store, 0, 1)
    assert mesh.mesh_dim_names == ("dp", "pp") and mesh.size() == 1
    store.set("rejoin/process 0", "another")
    with pytest.raises(fxpipe.InputError, match="another process has taken the place of rank 0"):
        fxpipe.rejoin(store, 0, 1)
    assert not dist.is_initialized()
