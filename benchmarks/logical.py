"""What control costs as the number of ranks grows, and one rank of many, on one machine.

``python -m benchmarks.logical`` runs the control of N ranks, which are threads of one process: they
meet in a real store, which has a process of its own, connect in the tree and with the neighbours in
the pipeline, and exchange what a warm step exchanges. Seconds are of processor time, as all share
the machine; lines are fitted through them.

``python -m benchmarks.logical --mesh dp=16,pp=16,tp=4 --rank 37`` compiles one rank of a mesh
without the others, over torch's ``fake`` process groups, and says what it takes.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxpipe
from benchmarks.machine import describe
from benchmarks.report import Figure, Grid, Report
from fxpipe.extensions.ranks import meeting
from fxpipe.extensions.ranks.agreement import Ranks
from fxpipe.extensions.ranks.group import RankGroup
from fxpipe.extensions.ranks.meeting import Meeting, within
from fxpipe.extensions.ranks.mesh import joined
from fxpipe.extensions.ranks.pairs import PairGroups
from fxpipe.extensions.ranks.program import OwnProgram
from fxpipe.extensions.ranks.tree import Neighbour
from fxpipe.extensions.tensor_parallel.collectives import bind
from fxpipe.ir import instruction as ins

COUNTS = 8, 16, 32, 64, 128, 256
"""Numbers of ranks."""

STEPS = 10
"""Steps whose control is measured."""

SERVED = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""

HEADINGS = (
    "ranks",
    "set-up, s",
    "set-up a rank, ms",
    "set-up in the store a rank, ms",
    "a step's control a rank, ms",
    "messages a rank and step",
    "bytes a rank and step",
    "in the store a step, ms",
    "descriptors a rank",
)


def control(count: int, store: Any, process: int) -> list[float]:
    """The figures of ``HEADINGS`` for so many ranks."""
    groups: list[Any] = [None] * count
    kept: list[PairGroups] = []  # there and back between neighbours, as in a pipeline
    names = [f"rank {rank}" for rank in range(count)]
    # one after another: torch looks up a name for each, which may wait for a server
    stores = [within(store.clone(), str(count)) for _ in range(count)]

    def connect(rank: int) -> None:
        met = Meeting(
            SimpleNamespace(clone=lambda: stores[rank]),
            rank,
            range(count),
            None,
            600,
            "{} has not come",
        )
        met.all()
        groups[rank] = joined(met, rank, names, 600, 1)
        met.leave()
        links = [(a, b) for a in (rank - 1, rank) for b in (a + 1,) if 0 <= a < b < count]
        pairs = PairGroups(groups[rank], torch.device("cpu"))
        pairs.connect(cast(OwnProgram, SimpleNamespace(links=[*links, *(x[::-1] for x in links)])))
        kept.append(pairs)

    def step(rank: int) -> None:
        group: RankGroup = groups[rank]
        for _ in range(STEPS):
            with group.calling("step", exchanges=True):
                group.agree("the call", "the same on all", value=(False, False))
                group.exchange("the barrier")
                group.settle({rank: 2, "loss": 0.5 if rank == count - 1 else None})

    sent: list[int] = []
    send = Neighbour.send

    def counted(own: Neighbour, message: Any = b"") -> None:
        if message:
            sent.append(len(message))
        send(own, message)

    before = _descriptors(), _spent(), _spent_by(process)
    begun = time.monotonic()
    _together(count, connect)
    elapsed = time.monotonic() - begun
    after = _descriptors(), _spent(), _spent_by(process)
    _together(count, step)  # the first ones
    begin = _spent(), _spent_by(process)
    with patch.object(Neighbour, "send", counted):
        _together(count, step)
    end = _spent(), _spent_by(process)
    for pairs in kept:
        pairs.abort()
    for group in groups:
        group._tree.end()
    for group in groups:
        group.close()
    return [
        count,
        elapsed,
        (after[1] - before[1]) / count * 1e3,
        (after[2] - before[2]) / count * 1e3,
        (end[0] - begin[0]) / count / STEPS * 1e3,
        len(sent) / count / STEPS,
        sum(sent) / count / STEPS,
        (end[1] - begin[1]) / STEPS * 1e3,
        (after[0] - before[0]) / count,
    ]


def _together(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _spent() -> float:
    """Seconds of processor time of this process."""
    return time.process_time()


def _spent_by(process: int) -> float:
    """Those of another one."""
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """The line of the least squares: its value at 0, and its slope."""
    x, y = torch.tensor(xs, dtype=torch.float64), torch.tensor(ys, dtype=torch.float64)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    return float(y.mean() - slope * x.mean()), float(slope)


def simulate(counts: Sequence[int]) -> Report:
    """Measure the control of these numbers of ranks."""
    meeting.LOST = math.inf  # many threads of one process are slow to show that they live
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    command = [sys.executable, "-c", SERVED]
    rows = []
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as served:
        try:
            assert served.stdout is not None
            port = int(served.stdout.readline())
            for count in counts:
                tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
                rows.append(control(count, tcp("127.0.0.1", port, is_master=False), served.pid))
                print(dict(zip(HEADINGS, rows[-1], strict=True)), flush=True)
        finally:
            served.kill()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    figures = []
    for at, unit in ((1, "s"), (2, "ms"), (4, "ms"), (6, "bytes"), (7, "ms")):
        first, slope = line([row[0] for row in rows], [row[at] for row in rows])
        name = HEADINGS[at].partition(", ")[0]
        figures.append(Figure(f"{name}, for N ranks", f"{first:.3g} {slope:+.2g} N {unit}"))
    return Report(
        "logical",
        "Control of many ranks",
        {"ranks": "threads of one process", "steps": STEPS, "store": "a TCPStore, in a process"},
        figures,
        describe(),
        [Grid(HEADINGS, [[f"{cell:.3g}" for cell in row] for row in rows])],
    )


class Alone(Ranks):
    """A rank without the others, which all say what it says."""

    def __init__(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or ()
        others = [dim for dim in names if dim not in ("dp", "pp")]
        order = [names.index(dim) for dim in (*others, "dp", "pp")]
        ranks = mesh.mesh.permute(order).flatten().tolist()
        columns = {
            dim: [ranks.index(each) for each in dist.get_process_group_ranks(mesh.get_group(dim))]
            for dim in others
        }
        called = [f"rank {number}" for number in ranks]
        self._stand(ranks.index(dist.get_rank()), called, mesh["dp"].size(), columns)
        self.groups = {dim: mesh.get_group(dim) for dim in others}
        for dim, group in self.groups.items():
            bind(dim, group)
        self.epoch = self.summed = self.threads = 0
        self.timeout, self.closed, self.store = 60.0, False, None

    @contextmanager
    def calling(self, what: str, *, exchanges: bool = False) -> Iterator[None]:
        yield

    @contextmanager
    def _in_columns(self) -> Iterator[None]:
        yield

    def exchange(self, about: str, value: Any = None, *, held: bool = False) -> list[Any]:
        return [value] * self.size

    def share(self, about: str, make: Callable[[], Any]) -> Any:
        return make()

    def check(self) -> None:
        pass

    def announce(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def rank_of(sizes: Mapping[str, int], rank: int, microbatches: int) -> Report:
    """Compile one rank of a mesh, whose model has two layers for each stage."""
    devices, replicas = sizes.get("pp", 1), sizes.get("dp", 1)
    size = math.prod(sizes.values())
    limit = timedelta(seconds=60)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size, timeout=limit)
    shape = {"dp": replicas, "pp": devices, **sizes}
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    torch.set_num_threads(1)
    layers = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2 * devices))
    model, x = nn.Sequential(*layers), torch.ones(microbatches, 16)
    if parts := [dim for dim in shape if dim not in ("dp", "pp")]:
        ways = ColwiseParallel, RowwiseParallel
        plan: Any = {f"{at}.0": ways[at % 2]() for at in range(2 * devices)}
        parallelize_module(model, mesh[parts[0]], plan)
    memory, begin = _resident(), time.process_time()
    given = Alone(mesh), [torch.device("cpu")] * devices
    with patch("fxpipe.entry.read_group", lambda devices: given):
        pipe = fxpipe.compile(
            model,
            devices,
            microbatches=microbatches,
            loss=mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            partition=[str(2 * stage) for stage in range(1, devices)],
        )
        pipe.prepare(x, target=x)
    gc.collect()
    seconds, memory = time.process_time() - begin, _resident() - memory
    compiled = pipe._calls.compiled()
    own = compiled.program
    assert isinstance(own, OwnProgram)
    row = own.lists[given[0].device]
    sends = [x for x in row if isinstance(x, ins.Send)]
    specs = compiled.specs[0]
    bytes_sent = sum(specs[x.buffer.value].bytes for x in sends if x.buffer.value in specs)
    figures = [
        Figure("processor time to compile", seconds, "s"),
        Figure("memory beside the model", memory / 2**20, "MiB"),
        Figure("instructions of this rank", len(row)),
        Figure("values that it sends a step", len(sends)),
        Figure("bytes of these", bytes_sent),
        Figure("exchanges a step", 3),
    ]
    settings: dict[str, str | int] = {"mesh": str(dict(sizes)), "rank": rank}
    settings["micro-batches"] = microbatches
    return Report("logical-rank", f"Rank {rank} of {size}", settings, figures, describe())


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mesh", help="such as dp=16,pp=16")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--counts", type=int, nargs="*", default=COUNTS)
    given = parser.parse_args()
    if given.mesh is None:
        simulate(given.counts).publish()
        os._exit(0)  # without waiting for the threads of many ranks
    sizes = {name: int(size) for name, size in (x.split("=") for x in given.mesh.split(","))}
    if len(sizes.keys() - {"dp", "pp"}) > 1:
        parser.error("give one dimension besides dp and pp")
    rank_of(sizes, given.rank, given.microbatches).publish()


if __name__ == "__main__":
    main()
