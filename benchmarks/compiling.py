"""Compare the time to compile on two ranks with that of one process with both devices.

Each round starts new processes that compile once: one process, then two ranks. Run it with
``python -m benchmarks.compiling`` on an idle machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import fxpipe
from benchmarks.machine import describe
from benchmarks.meeting import meeting_place
from benchmarks.peers.case import CASES, DEVICES
from benchmarks.report import Figure, Report


class Taken(NamedTuple):
    """Seconds of the clock and of the processor; of the process that took the most."""

    wall: float
    cpu: float


def compiled(case: str, processes: int) -> Taken:
    """What compiling a step takes in new processes."""
    context = multiprocessing.get_context("spawn")
    meeting = meeting_place()
    ours, theirs = zip(*(context.Pipe() for _ in range(processes)), strict=True)
    workers = [
        context.Process(target=_compile, args=(case, processes, rank, meeting, end))
        for rank, end in enumerate(theirs)
    ]
    for worker, end in zip(workers, theirs, strict=True):
        worker.start()
        end.close()  # so that its end is noticed when the process dies
    taken = [end.recv() for end in ours]
    for worker in workers:
        worker.join()
    return Taken(*map(max, zip(*taken, strict=True)))


def _compile(case: str, processes: int, rank: int, meeting: str, end: Connection) -> None:
    """One process."""
    work = CASES[case]
    model, x, y = work.make()
    devices: Any = DEVICES
    torch.set_num_threads(DEVICES // processes)  # one for each device
    if processes > 1:
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)
        devices = init_device_mesh("cpu", (processes,), mesh_dim_names=("pp",))
        distributed.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    pipe = fxpipe.compile(
        model,
        devices,
        microbatches=work.microbatches,
        loss=work.loss,
        optimizer=work.optimizer,
        example=((x,), {"target": y}),
    )
    end.send((time.perf_counter() - start, time.process_time() - cpu))
    pipe.close()
    if processes > 1:
        distributed.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description="Time compiling on ranks and in one process.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--case", action="append", choices=list(CASES), help="by default all")
    arguments = parser.parse_args()
    machine = describe()
    figures: list[Figure] = []
    samples: dict[str, list[float]] = {}
    for case in arguments.case or CASES:
        found: dict[int, list[Taken]] = {1: [], DEVICES: []}
        for round_ in range(1 + arguments.rounds):
            for processes in sorted(found, reverse=bool(round_ % 2)):
                found[processes].append(compiled(case, processes))
        alone, ranks = found[1][1:], found[DEVICES][1:]  # the first round reads files
        for what, index in (("compiled", 0), ("processor time", 1)):
            one, two = ([each[index] for each in taken] for taken in (alone, ranks))
            figures += [
                Figure(f"{case}: {what}, one process", median(one), "s"),
                Figure(f"{case}: {what}, {DEVICES} ranks", median(two), "s"),
                Figure(f"{case}: {what}, ranks over one process", median(two) / median(one)),
            ]
        ratios = [two.wall / one.wall for one, two in zip(alone, ranks, strict=True)]
        figures.append(Figure(f"{case}: compiled, median of the rounds' ratios", median(ratios)))
        samples |= {f"{case}, one process": [each.wall for each in alone]}
        samples |= {f"{case}, {DEVICES} ranks": [each.wall for each in ranks]}
    settings = {
        "models": "those of benchmarks.compare, with example=, so that compile does all of it",
        "ranks": "of the ranks the one that takes the most; the meeting of the ranks included, "
        "init_process_group and init_device_mesh not",
        "rounds": f"{arguments.rounds}, each with new processes, of which the median is told",
    }
    title = "Compiling on two ranks and in one process"
    Report("compiling", title, settings, figures, machine, samples=samples).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
