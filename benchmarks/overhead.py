"""Measure the library's own overhead per task, on a model so small that little else takes time.

Run it with ``python -m benchmarks.overhead`` on an idle machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from benchmarks.machine import describe
from benchmarks.meeting import meeting_place
from benchmarks.peers.case import CASES
from benchmarks.peers.contenders import PIPELINING, RANKS, THREADS
from benchmarks.peers.group import Group
from benchmarks.peers.pipe import RankPipe
from benchmarks.report import Figure, Report, timed
from examples import plain
from examples.unet import UNet
from fxpipe.ir.instruction import Receive, Send
from fxpipe.runtime.choice import Dispatches

LAYERS = 4
WIDTH = 8
MICROBATCHES = 64
WARM_UP = 5
COMPILED = 3
"""How often each is compiled."""


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def pipelined(devices: int, dispatch: Dispatches, x: Tensor, y: Tensor, rounds: int) -> float:
    """Median seconds of a step over so many devices."""
    with fxpipe.compile(
        tiny(),
        ["cpu"] * devices,
        microbatches=MICROBATCHES,
        loss=mse_loss,
        optimizer=torch.optim.SGD,
        extensions=[fxpipe.Dispatch(dispatch)],
    ) as pipe:
        seconds = [timed(lambda: pipe.step(x, target=y))[1] for _ in range(WARM_UP + rounds)]
    return median(seconds[WARM_UP:])


def alone(x: Tensor, y: Tensor, rounds: int) -> float:
    """Median seconds of the same step as a plain loop on one thread."""
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters())
    with plain.one_thread():
        seconds = [
            timed(lambda: plain.step(model, mse_loss, optimizer, x, y, MICROBATCHES))[1]
            for _ in range(WARM_UP + rounds)
        ]
    return median(seconds[WARM_UP:])


def processes(rounds: int) -> tuple[float, float]:
    """Median seconds of the same step over two ranks, and over two processes of
    torch.distributed.pipelining, in turn."""
    with closing(Group(RANKS, "tiny")) as own, closing(Group(PIPELINING, "tiny")) as peer:
        for group in (own, peer):
            group.imported()
            group.set_up()
        turns = [(own.step().seconds, peer.step().seconds) for _ in range(WARM_UP + rounds)]
    ours, theirs = zip(*turns[WARM_UP:], strict=True)
    return median(ours), median(theirs)


def messages(steps: int) -> tuple[float, float]:
    """Median seconds of a message between two ranks: what both spend on one that has arrived
    before it is waited for, and how long after it was sent a rank goes on that has waited."""
    with tempfile.TemporaryDirectory() as folder:
        context, meeting = multiprocessing.get_context("spawn"), meeting_place()
        ranks = [
            context.Process(target=_profile, args=(rank, meeting, folder, steps))
            for rank in range(2)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        found: tuple[float, float] = torch.load(Path(folder, "found"))
        return found


def _profile(rank: int, meeting: str, folder: str, steps: int) -> None:
    with closing(RankPipe(CASES["tiny"], rank, meeting)) as ranks:
        for _ in range(WARM_UP):
            ranks.step()
        spans = [*ranks.pipe.profile(ranks.x, target=ranks.y, steps=steps).instructions()]
        sent = {x.instruction.buffer: x for x in spans if isinstance(x.instruction, Send)}
        pairs = [
            (sent[x.instruction.buffer], x) for x in spans if isinstance(x.instruction, Receive)
        ]
        hidden = [a.time + b.time for a, b in pairs if a.end < b.start]
        waited = [b.end - a.start for a, b in pairs if b.start < a.start]
        if rank == 0:
            torch.save((median(hidden), median(waited)), Path(folder, "found"))


def first_step(contender: str) -> float:
    """Seconds from the small U-Net to the end of its first step, imports left out."""
    with closing(Group(contender, "unet")) as group:
        group.imported()
        return timed(group.set_up)[1] + group.step().seconds


def compiling() -> float:
    """Seconds from a U-Net to the end of its first step, over two devices."""
    batch = torch.rand(32, 3, 64, 64)

    def run() -> None:
        with fxpipe.compile(UNet(), ["cpu", "cpu"], microbatches=8, loss=mse_loss) as pipe:
            pipe.step(batch, target=batch)

    return timed(run)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Time what the library itself costs.")
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    machine = describe()

    torch.set_num_threads(2)  # one for each device
    x, y = torch.rand(MICROBATCHES * WIDTH, WIDTH), torch.rand(MICROBATCHES * WIDTH, WIDTH)
    single, one = alone(x, y, rounds), pipelined(1, "device", x, y, rounds)
    each, all_ = (pipelined(2, dispatch, x, y, rounds) for dispatch in get_args(Dispatches))
    ours, theirs = processes(rounds)
    hidden, waited = messages(rounds)
    first = {who: median(first_step(who) for _ in range(COMPILED)) for who in (THREADS, RANKS)}
    tasks = 2 * MICROBATCHES  # a forward and a backward each, on every device
    figures = [
        Figure("plain loop, one thread, a forward or backward", 1e3 * single / tasks, "ms"),
        Figure("one device, a task", 1e3 * one / tasks, "ms"),
        Figure("one device, a task above the plain loop", 1e3 * (one - single) / tasks, "ms"),
        Figure("two devices, a thread each, a task of either", 1e3 * each / tasks, "ms"),
        Figure("two devices, one thread, a task of either", 1e3 * all_ / tasks, "ms"),
        Figure("two ranks, a task of either", 1e3 * ours / tasks, "ms"),
        Figure("torch.distributed.pipelining, two processes, a task", 1e3 * theirs / tasks, "ms"),
        Figure("two ranks, a message that has arrived before it is read", 1e3 * hidden, "ms"),
        Figure("two ranks, a message that is waited for", 1e3 * waited, "ms"),
        Figure("first step of the small U-Net, two threads", first[THREADS], "s"),
        Figure("first step of the small U-Net, two ranks", first[RANKS], "s"),
        Figure("the second over the first", first[RANKS] / first[THREADS]),
        Figure("compile time of the U-Net, with the first step", compiling(), "s"),
    ]
    settings = {
        "model": f"{LAYERS} × Linear({WIDTH}, {WIDTH}), SGD, mean squared error",
        "micro-batches": f"{MICROBATCHES} of {WIDTH} rows",
        "schedule": "1f1b",
        "message": f"{WIDTH * WIDTH} numbers between two processes, from the profile of a rank: "
        "the sender's and the receiver's time together, or from the send to the end of the wait",
        "rounds": rounds,
        "small U-Net": f"{CASES['unet'].title}, in {CASES['unet'].microbatches}, compile time "
        "with it",
        "U-Net": "examples.unet.UNet(channels=3, base=16, depth=4), batch 32×3×64×64 in 8",
    }
    Report("overhead", "Overhead a task", settings, figures, machine).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
