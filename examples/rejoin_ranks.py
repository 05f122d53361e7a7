"""Train over several processes, one of which may die and be replaced while the others stay.

    python -m examples.rejoin_ranks --processes=2

This process has the store where the others meet, and starts another in the place of one that dies.
Those that are left keep all that they have loaded, compile again, and go on with the newcomer from
the last checkpoint. They reach the same weights as if nothing had happened. Kill one and see.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import fxpipe
from examples.train_ranks import train


def launch(
    work: Callable[[int, int], None],
    processes: int,
    restarts: int,
    context: Any = multiprocessing.get_context("spawn"),  # noqa: B008
) -> int:
    """Call ``work`` in processes, with a rank and the port of the store, until all have ended.

    When one has ended well, the last checkpoint is written, and none is replaced any more. Returns
    how many were replaced.

    Raises:
        RuntimeError: more than ``restarts`` have died.
    """
    tcp: Any = dist.TCPStore  # type: ignore[attr-defined,unused-ignore]
    store = tcp("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(rank: int) -> Any:
        process = context.Process(target=work, args=(rank, store.port))
        process.start()
        return process

    running = {rank: start(rank) for rank in range(processes)}
    replaced, done = 0, False
    while running:
        for rank, process in list(running.items()):
            if process.is_alive():
                continue
            done = done or process.exitcode == 0
            if done:
                del running[rank]
                continue
            replaced += 1
            if replaced > restarts:
                for each in running.values():
                    each.kill()
                raise RuntimeError(f"more than {restarts} processes have died")
            running[rank] = start(rank)
        time.sleep(0.05)
    return replaced


def take_part(rank: int, port: int, *, folder: str, steps: int, every: int, processes: int) -> None:
    """Train as one of the ranks."""
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined,unused-ignore]
    while True:
        mesh = fxpipe.rejoin(store, rank, processes)
        try:
            return train(folder, steps, every, mesh)
        except fxpipe.RankError as error:
            print(f"{error}; meeting again", file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", default="rejoin-ranks", help="where the checkpoint is")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--restarts", type=int, default=20, help="how many may be replaced")
    options = vars(parser.parse_args())
    restarts = options.pop("restarts")
    launch(partial(take_part, **options), options["processes"], restarts)
