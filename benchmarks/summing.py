"""Measure how much of summing gradients over replicas hides behind other tasks, and simulate it.

Each rank is a process, with tasks of equal length as in ``benchmarks.overlap``. Collectives of the
replicas are delayed as long as a link of a given rate would take, one after another; everything
else is sent at full speed.

Run it with ``python -m benchmarks.summing`` on an idle machine.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import fxpipe
from benchmarks.machine import describe
from benchmarks.meeting import meeting_place
from benchmarks.overlap import TASK, lengthen
from benchmarks.report import Figure, Grid, Report
from fxpipe.extensions.replicas.exchanges import Sum
from fxpipe.extensions.simulator import Link, Simulation

LAYERS, WIDTH = 8, 256
"""Of the model whose gradients are summed: 2 MiB of them."""

SUMS = (
    "sums of gradients",
    "bytes a rank sends, a step",
    "hides, on paper",
    "hides, measured",
    "difference",
    "step, ms",
)


STEPS = 2
"""Of a round in which gradients are summed."""

LINK = 1.5 * TASK
"""Seconds that its bytes take on the way from a replica to the others."""


class Case(NamedTuple):
    """A run whose sums of gradients are measured.

    Attributes:
        schedule: its name.
        replicas: how many there are.
        devices: of each.
        options: of ``fxpipe.Replicas``.
    """

    schedule: str
    replicas: int
    devices: int
    options: Mapping[str, Any]

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.schedule}, {self.replicas} × {self.devices} ranks, {told}"


CASES = (
    Case("1f1b", 2, 1, {"bucket_cap_mb": math.inf}),
    Case("1f1b", 2, 1, {"bucket_cap_mb": 0.5}),
    Case("1f1b", 2, 1, {"bucket_cap_mb": 0.5, "shard_optimizer": True}),
    Case("1f1b", 2, 2, {"bucket_cap_mb": 0.25}),
    Case("2bw", 2, 2, {"bucket_cap_mb": 0.25}),
    Case("1f1b", 3, 1, {"bucket_cap_mb": 0.5}),
)


class Summed(NamedTuple):
    """What a replica found in a round.

    Attributes:
        waits: seconds of each wait for other replicas, device by device in its order.
        predicted: of all of them in the simulation.
        link: seconds in which something is on its way to other replicas.
        step: of a step.
        sent: bytes of a step that a rank has sent for it.
    """

    waits: Sequence[float]
    predicted: float
    link: float
    step: float
    sent: int


class Held:
    """A collective that ends no sooner than on a link of some rate."""

    def __init__(self, work: Any, end: float) -> None:
        self.work, self.end = work, end

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(self.end - time.perf_counter(), 0))


def hold_back(group: Any, pairs: Any, rate: float) -> None:
    """Let what goes to the other replicas take as long as on a link of so many bytes a second."""
    free, others = 0.0, group.replicas - 1

    def held(launch: Callable[..., Any], share: float) -> Callable[..., Any]:
        def call(into: torch.Tensor, *given: Any) -> Held:
            nonlocal free
            free = max(free, time.perf_counter()) + into.nbytes * share / rate
            return Held(launch(into, *given), free)

        return call

    twins, share = pairs.twins, others / group.replicas  # of what a collective fills
    pairs._groups[tuple(group.twins)] = SimpleNamespace(
        alltoall_base=held(twins.alltoall_base, share),
        _allgather_base=held(twins._allgather_base, share),
        broadcast=twins.broadcast,
        rank=twins.rank,
        recv=twins.recv,
    )


def waits(found: Simulation) -> list[float]:
    """Seconds of each wait for other replicas."""
    waiting = (s for s in found.instructions() if s.instruction.awaits(found.program) is not None)
    return [s.time for s in waiting]


def _sum(case: Case, rank: int, meeting: str, rounds: int, end: Connection) -> None:
    """Runs as one rank, and sends what it found."""
    torch.set_num_threads(1)
    count = case.replicas * case.devices
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", (case.replicas, case.devices), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    x = torch.rand(4, WIDTH)
    half = LAYERS // 2
    pipe = fxpipe.compile(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))),
        mesh,
        schedule=case.schedule,
        microbatches=4,
        loss=mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        partition=[str(half)] if case.devices == 2 else "auto",
        example=((x,), {"target": x}),
        extensions=[fxpipe.Replicas(**case.options)],
    )
    for stage in pipe.plan.stages:
        lengthen(stage.kernel, stage.buckets)
    pipe.step(x, target=x)
    pipe.flush()
    group: Any = pipe._group
    rate = max(pipe.simulate(steps=1).summed(case.replicas - 1)) / LINK
    hold_back(group, pipe._engine.backend.pairs, rate)  # type: ignore[attr-defined]
    own = range(case.devices)
    ways: dict[tuple[int, int], Link] = {(a, b): Link() for a in own for b in own}
    ways |= {(a, a): Link(bandwidth=rate) for a in own}
    found: list[Summed] = []
    for _ in range(rounds):
        before = group.summed
        made = pipe.profile(x, target=x, steps=STEPS)
        paper = pipe.simulate(costs=made.costs, links=ways, steps=STEPS)
        link = sum(t.end - t.start for t in paper.transfers if isinstance(t.buffer, Sum))
        sent = (group.summed - before) // STEPS
        found.append(Summed(waits(made), sum(waits(paper)), link, made.makespan / STEPS, sent))
    end.send(found if group.device == 0 else [])
    pipe.close()
    distributed.destroy_process_group()


def on_slow_links(case: Case, rounds: int) -> list[list[Summed]]:
    """Replica → its figures, of each round."""
    context, meeting = multiprocessing.get_context("spawn"), meeting_place()
    pipes = [context.Pipe() for _ in range(case.replicas * case.devices)]
    ranks = [
        context.Process(target=_sum, args=(case, rank, meeting, rounds, end))
        for rank, (_, end) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for _, end in pipes:
        end.close()  # so that a rank that has ended is noticed
    found = [here.recv() for here, _ in pipes]
    for process in ranks:
        process.join()
    return [each for each in found if each]


def summing_row(case: Case, rounds: int) -> list[str]:
    """A row of the table: what hides on paper and in the run, in the median of the rounds.

    Of each wait the shortest of all replicas counts: the last one to begin it waits for the link
    alone, and the others for that one, too.
    """
    paper, real = [], []
    for replicas in zip(*(found := on_slow_links(case, rounds)), strict=True):
        waited = sum(map(min, zip(*(each.waits for each in replicas), strict=True)))
        real.append(1 - waited / replicas[0].link)
        paper.append(1 - replicas[0].predicted / replicas[0].link)
    return [
        str(case),
        f"{found[0][0].sent:,}",
        f"{median(paper):.3f}",
        f"{median(real):.3f}",
        f"{median(real) - median(paper):+.3f}",
        f"{1e3 * median(each.step for each in found[0]):.1f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Time what sums gradients over replicas.")
    parser.add_argument("--rounds", type=int, default=5)
    rounds, machine = parser.parse_args().rounds, describe()
    summed = [summing_row(case, rounds) for case in track(CASES, "sums")]
    grids = [Grid(SUMS, summed)]
    furthest = max((float(row[4]) for row in summed), key=abs)
    figures = [Figure("hidden share of sums, furthest from the simulated one", furthest)]
    settings = {
        "sums": f"{LAYERS} layers of {WIDTH} × {WIDTH}, m = 4, forward and backward of "
        f"{1e3 * TASK:g} ms each, a link on which the bytes of a step take {1e3 * LINK:g} ms in "
        "each direction",
        "rounds": rounds,
    }
    title = "Sums of gradients over replicas"
    Report("summing", title, settings, figures, machine, grids).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
