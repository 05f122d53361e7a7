"""Processes that are killed at drawn moments, mostly while ranks meet, compile or load: those that
are left meet the new ones, wait for no timeout, and reach the weights of one process."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from examples import rejoin_ranks, train_ranks
from fxpipe.extensions.checkpoint import folder as checkpoint_folder
from tests.helpers.checkpoints import same
from tests.helpers.profiles import DEEP, deep
from tests.helpers.ranks import CONTEXT

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are killed as POSIX does")

KILLS = 30 if DEEP else 6

STEPS, EVERY = 6, 2

LIMIT = 25.0
"""Seconds after a kill in which training goes on; gloo alone waits for 30 s, and ``rejoin`` for ten
minutes."""

MOMENT = 0.9
"""The most seconds between the moment when all have begun to meet and a kill."""

tcp: Any = dist.TCPStore  # type: ignore[attr-defined,unused-ignore]


def part(rank: int, port: int, *, folder: Path, processes: int) -> None:
    """Train as one of the ranks. The last batch comes once nobody is killed any more; when somebody
    is, it does not wait, so that the step finds out."""
    made, seen = train_ranks.batch, 0

    def batch(number: int) -> Any:
        nonlocal seen
        if number == 0:
            seen = len([*folder.glob("kill-*")])
        while number == STEPS - 1 and not (folder / "enough").exists():
            time.sleep(0.01)
            if len([*folder.glob("kill-*")]) > seen:
                break
        return made(number)

    train_ranks.batch = batch
    rejoin_ranks.take_part(
        rank,
        port,
        folder=str(folder / "checkpoint"),
        steps=STEPS,
        every=EVERY,
        processes=processes,
    )


def killed(processes: int, kills: int, folder: Path) -> None:
    """Kill drawn processes at drawn moments, now and then the newcomer, or two of them."""
    store, draw = tcp("127.0.0.1", 0, is_master=True, wait_for_workers=False), random.Random(kills)
    work = partial(part, folder=folder, processes=processes)

    def start(rank: int) -> Any:
        process = CONTEXT.Process(target=work, args=(rank, store.port))
        process.start()
        return process

    running = {rank: start(rank) for rank in range(processes)}
    try:
        for kill in range(kills):
            time.sleep(draw.uniform(0, MOMENT if kill else 2 * MOMENT))
            for rank in draw.sample(range(processes), 2 if draw.random() < 0.2 else 1):
                assert running[rank].exitcode is None, f"rank {rank} has ended by itself"
                running[rank].kill()
                running[rank].join()
                (folder / f"kill-{kill}-{rank}").touch()
                assert running[rank].exitcode == -signal.SIGKILL
                running[rank] = start(rank)
        (folder / "enough").touch()
        deadline = time.monotonic() + LIMIT
        for rank, process in running.items():
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode == 0, f"rank {rank}, {process.exitcode}"
    finally:
        for process in running.values():
            process.kill()


@pytest.mark.parametrize("processes", [3, *deep(4)])
def test_ranks_meet_again_after_a_kill_at_any_moment(processes: int, tmp_path: Path) -> None:
    killed(processes, KILLS, tmp_path)
    train_ranks.train(str(tmp_path / "whole"), STEPS, EVERY, 1)
    found, whole = (checkpoint_folder.read(tmp_path / name) for name in ("checkpoint", "whole"))
    assert same(found.parameters, whole.parameters)
    assert found.optimizer is not None and whole.optimizer is not None
    for name, own in whole.optimizer.parameters.items():
        assert same(found.optimizer.parameters[name].state, own.state), name
