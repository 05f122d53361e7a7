"""Time a transformer over two CPU devices, a plain loop and torch.distributed.pipelining, in turn.

The loop has one thread; torch's 1F1B has two processes of one thread each. Two plain loops at once,
with one thread each, show how much this machine's two threads can do without any waits.

Run it with ``python -m benchmarks.transformer`` on an idle machine.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from statistics import median
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

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

PIPES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "zb-h1": {"schedule": "zb-h1"},
}
LOOP = "plain loop, one thread"
TWICE = "two plain loops at once"
PROCESSES = "torch.distributed.pipelining, two processes"


class Loop:
    """A plain loop over the micro-batches, in the thread that calls it."""

    def __init__(self) -> None:
        self.model, self.x, self.y = CASE.make()
        self.optimizer = CASE.optimizer(self.model.parameters())

    def step(self) -> Tensor:
        with plain.one_thread():
            return plain.step(
                self.model, CASE.loss, self.optimizer, self.x, self.y, CASE.microbatches
            )


def main() -> int:
    """Run the benchmark; returns 1 if the losses of a pipeline and the loop differ."""
    parser = argparse.ArgumentParser(description="Time a transformer over two CPU devices.")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    machine = describe()

    alone, others = Loop(), [Loop() for _ in DEVICES]
    x, y = alone.x, alone.y
    torch.set_num_threads(len(DEVICES))  # one for each device
    times: dict[str, list[float]] = defaultdict(list)
    same, apart = dict.fromkeys(PIPES, True), dict.fromkeys(PIPES, 0.0)
    with ExitStack() as stack:
        peer = stack.enter_context(closing(Group(PIPELINING, "transformer")))
        pipes = {
            name: stack.enter_context(
                fxpipe.compile(
                    CASE.make()[0],
                    DEVICES,
                    microbatches=CASE.microbatches,
                    loss=CASE.loss,
                    optimizer=CASE.optimizer,
                    **options,
                )
            )
            for name, options in PIPES.items()
        }
        threads = stack.enter_context(ThreadPoolExecutor(len(DEVICES)))
        peer.imported()
        peer.set_up()
        for _ in track(range(WARM_UP + arguments.rounds), "a step of each in turn"):
            expected, seconds = timed(alone.step)
            times[LOOP].append(seconds)
            for name, pipe in pipes.items():
                loss, seconds = timed(functools.partial(pipe.step, x, target=y))
                times[name].append(seconds)
                same[name] = same[name] and torch.equal(loss, expected)
                apart[name] = max(apart[name], abs(float(loss / expected) - 1))
            times[PROCESSES].append(peer.step().seconds)
            times[TWICE].append(timed(lambda: list(threads.map(Loop.step, others)))[1])
    first = times["1f1b"][0]
    took = {name: each[WARM_UP:] for name, each in times.items()}
    middle = {name: median(each) for name, each in took.items()}
    figures = [figure for name, each in took.items() for figure in spread(name, each)]
    figures += [
        Figure(f"plain loop over {name}", middle[LOOP] / middle[name])
        for name in (*PIPES, PROCESSES)
    ]
    figures += [
        Figure(f"two processes over {name}", middle[PROCESSES] / middle[name]) for name in PIPES
    ]
    figures += [
        Figure("two loops at once over one after the other", 2 * middle[LOOP] / middle[TWICE]),
        Figure(
            "ideal ratio of 1f1b, stages of equal work",
            len(DEVICES) * CASE.microbatches / (CASE.microbatches + len(DEVICES) - 1),
        ),
        Figure("compile time of 1f1b, with the first step", first, "s"),
    ]
    figures += [
        Figure(
            f"losses, {name}",
            "equal bit for bit" if same[name] else f"within {each:.1e} of the loop's",
        )
        for name, each in apart.items()
    ]
    settings = {
        "model": f"{CASE.title}, mean squared error",
        "micro-batches": CASE.microbatches,
        "devices": ", ".join(DEVICES),
        "peer": "Schedule1F1B over gloo, two processes of one thread, equal halves",
        "rounds": arguments.rounds,
    }
    title = "Transformer, two CPU devices beside one thread and two processes"
    Report("transformer", title, settings, figures, machine).publish()
    return 0 if all(same.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
