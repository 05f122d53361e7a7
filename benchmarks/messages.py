"""Time a tensor from one CPU rank to another, beside a bare ``dist.send`` and ``dist.recv``.

Both ranks are processes of this machine. A tensor goes there and another one back; half of that is
a message. Run it with ``python -m benchmarks.messages`` on an idle machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

import fxpipe
from benchmarks.machine import describe
from benchmarks.meeting import meeting_place
from benchmarks.report import Figure, Grid, Report
from fxpipe.extensions.ranks.pairs import PairGroups

SIZES: Mapping[str, tuple[int, int]] = {
    "1 KiB": (1 << 10, 400),
    "1 MiB": (1 << 20, 100),
    "16 MiB": (1 << 24, 20),
}
"""Name → bytes of a tensor, and round trips of a measurement."""

Trips = Callable[[Tensor, Tensor, int], None]
"""Makes round trips: with the tensor to send, the memory to receive into, and their number."""


def bare(rank: int) -> Trips:
    """What torch.distributed offers."""

    def trips(sent: Tensor, room: Tensor, count: int) -> None:
        for _ in range(count):
            if rank == 0:
                distributed.send(sent, 1)
                distributed.recv(room, 1)
            else:
                distributed.recv(room, 0)
                distributed.send(sent, 0)

    return trips


def posted(rank: int, pairs: PairGroups) -> Trips:
    """As the channels of a pipe do: each receive is posted ahead, and no send is waited for."""

    def trips(sent: Tensor, room: Tensor, count: int) -> None:
        works: list[Any] = []
        work = pairs.receive(1 - rank, room)
        for left in range(count - 1, -1, -1):
            if rank == 0:
                works.append(pairs.send(1, sent))
            work.wait()
            if left:
                work = pairs.receive(1 - rank, room)
            if rank == 1:
                works.append(pairs.send(0, sent))
        distributed.barrier()  # all has arrived

    return trips


def _rank(rank: int, meeting: str, rounds: int, end: Connection) -> None:
    """Runs as one rank, and sends size → way → seconds of a message in each round."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    x = torch.ones(2, 4)
    model, loss = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.functional.mse_loss
    with fxpipe.compile(model, mesh, microbatches=2, partition=["1"], loss=loss) as pipe:
        pipe.step(x, target=x)
        backend: Any = pipe._engine.backend
        ways = {"send and recv": bare(rank), "fxpipe": posted(rank, backend.pairs)}
        found: dict[str, dict[str, list[float]]] = {size: {} for size in SIZES}
        for _ in range(rounds + 1):
            for size, (nbytes, count) in SIZES.items():
                sent, room = torch.rand(nbytes // 4), torch.empty(nbytes // 4)
                for way, trips in ways.items():
                    distributed.barrier()
                    begin = perf_counter()
                    trips(sent, room, count)
                    seconds = (perf_counter() - begin) / (2 * count)
                    found[size].setdefault(way, []).append(seconds)
    end.send(found)
    distributed.destroy_process_group()


def measured(rounds: int) -> dict[str, dict[str, float]]:
    """Size → way → the median seconds of a message; the first round does not count."""
    context, meeting = multiprocessing.get_context("spawn"), meeting_place()
    ends = [context.Pipe() for _ in range(2)]
    ranks = [
        context.Process(target=_rank, args=(rank, meeting, rounds, end))
        for rank, (_, end) in enumerate(ends)
    ]
    for process in ranks:
        process.start()
    for _, end in ends:
        end.close()  # so that a rank that has ended is noticed
    found, _ = (here.recv() for here, _ in ends)
    for process in ranks:
        process.join()
    return {
        size: {way: median(seconds[1:]) for way, seconds in ways.items()}
        for size, ways in found.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Time a tensor from one rank to another.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dry-run", action="store_true", help="print, and write no report")
    options, machine = parser.parse_args(), describe()
    found = measured(options.rounds)
    rows = [
        [size, *(f"{1e6 * s:.0f}" for s in ways.values()), f"{_ratio(ways):.2f}"]
        for size, ways in found.items()
    ]
    if options.dry_run:
        print(*map("  ".join, rows), sep="\n")
        return 0
    figures = [Figure(f"{size}, times a bare send", _ratio(ways)) for size, ways in found.items()]
    grids = [Grid(["tensor", "send and recv, µs", "fxpipe, µs", "ratio"], rows)]
    settings = {"ranks": "2 processes, gloo", "rounds": options.rounds}
    Report("messages", "Tensors between ranks", settings, figures, machine, grids).publish()
    return 0


def _ratio(ways: Mapping[str, float]) -> float:
    return ways["fxpipe"] / ways["send and recv"]


if __name__ == "__main__":
    sys.exit(main())
