"""A transformer over two CPU devices beside a plain loop on one thread, and beside two processes
of one thread each under torch.distributed.pipelining's 1F1B: a step of each in turn.

Run it with ``python -m benchmarks.transformer`` on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, closing
from statistics import median

import torch
from rich.progress import track

import fxpipe
from benchmarks.machine import describe
from benchmarks.peers.case import CASES
from benchmarks.peers.contenders import PIPELINING
from benchmarks.peers.group import Group
from benchmarks.report import Figure, Report, spread, timed
from examples import plain

DEVICES = ("cpu", "cpu")
CASE = CASES["transformer"]
WARM_UP = 3


def main() -> int:
    """Returns the exit status: 1 where the losses of the pipeline and the loop differ."""
    parser = argparse.ArgumentParser(description="Time a transformer over two CPU devices.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--schedule", default="1f1b")
    arguments = parser.parse_args()
    machine = describe()

    single, x, y = CASE.make()
    optimizer = CASE.optimizer(single.parameters())
    torch.set_num_threads(len(DEVICES))  # one for each device
    pipelined: list[float] = []
    fused: list[float] = []
    alone: list[float] = []
    processes: list[float] = []
    same, apart = True, 0.0
    with ExitStack() as stack:
        peer = stack.enter_context(closing(Group(PIPELINING, "transformer")))
        pipe, fuses = (
            stack.enter_context(
                fxpipe.compile(
                    CASE.make()[0],
                    DEVICES,
                    schedule=arguments.schedule,
                    microbatches=CASE.microbatches,
                    loss=CASE.loss,
                    optimizer=CASE.optimizer,
                    fuse_accumulation=fuse,
                )
            )
            for fuse in (False, True)
        )
        peer.imported()
        peer.set_up()
        for _ in track(range(WARM_UP + arguments.rounds), "a step of each in turn"):
            one, seconds = timed(lambda: pipe.step(x, target=y))
            pipelined.append(seconds)
            third, seconds = timed(lambda: fuses.step(x, target=y))
            fused.append(seconds)
            with plain.one_thread():
                other, seconds = timed(
                    lambda: plain.step(single, CASE.loss, optimizer, x, y, CASE.microbatches)
                )
            alone.append(seconds)
            processes.append(peer.step().seconds)
            same = same and torch.equal(one, other)
            apart = max(apart, abs(float(third / other) - 1))
    first = pipelined[0]
    pipelined, fused, alone, processes = (
        times[WARM_UP:] for times in (pipelined, fused, alone, processes)
    )
    figures = [
        *spread("pipeline", pipelined),
        *spread("pipeline, accumulation fused", fused),
        *spread("plain loop, one thread", alone),
        *spread("torch.distributed.pipelining, two processes", processes),
        Figure("plain loop over pipeline, of the medians", median(alone) / median(pipelined)),
        Figure("plain loop over pipeline, fused", median(alone) / median(fused)),
        Figure("plain loop over two processes", median(alone) / median(processes)),
        Figure("two processes over pipeline", median(processes) / median(pipelined)),
        Figure("two processes over pipeline, fused", median(processes) / median(fused)),
        Figure(
            "ideal ratio, stages of equal work",
            len(DEVICES) * CASE.microbatches / (CASE.microbatches + len(DEVICES) - 1),
        ),
        Figure("compile time, with the first step", first, "s"),
        Figure("losses", "equal bit for bit" if same else "different"),
        Figure("losses, fused", f"within {apart:.1e} of the loop's"),
    ]
    settings = {
        "model": f"{CASE.title}, mean squared error",
        "micro-batches": CASE.microbatches,
        "devices": ", ".join(DEVICES),
        "schedule": arguments.schedule,
        "peer": "Schedule1F1B over gloo, two processes of one thread, equal halves",
        "rounds": arguments.rounds,
    }
    title = "Transformer, two CPU devices beside one thread and two processes"
    Report("transformer", title, settings, figures, machine).publish()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
