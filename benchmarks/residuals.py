"""Attention residuals over four devices, beside peers: speed, memory, and bytes that cross.

A block of ``examples.attention_residuals`` reads what all earlier ones gave. The peers cannot train
this model. They are given it as four parts, written by hand, each of which gives the next one all
values so far. Each contender runs in processes of its own, and they take turns step by step. Run it
with ``python -m benchmarks.residuals``.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from statistics import median

import torch

import fxpipe
from benchmarks.machine import describe
from benchmarks.peers.contenders import GPIPE, LOOP, OURS, PIPELINING, RANKS, TRACED
from benchmarks.peers.contest import WARM_UP, Run
from benchmarks.peers.group import Group
from benchmarks.peers.residuals import CASE
from benchmarks.report import Figure, Grid, Report

WHO = (LOOP, GPIPE, PIPELINING, TRACED, OURS, RANKS)
MIB = 2**20


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Time attention residuals beside peers.")
    parser.add_argument("--rounds", type=int, default=CASE.rounds)
    rounds = parser.parse_args().rounds
    machine = describe()
    runs = [Run(who) for who in WHO]
    with ExitStack() as stack:
        groups = {who: Group(who, "residuals") for who in WHO}
        for group in groups.values():
            stack.callback(group.close)
        for order in (Group.imported, Group.set_up):
            for run in runs:
                with run.noting():
                    order(groups[run.contender])
        for number in range(WARM_UP + rounds):
            for run in runs:
                with run.noting():
                    if number == WARM_UP:
                        groups[run.contender].reset()
                    run.steps.append(groups[run.contender].step())
        for run in runs:
            with run.noting():
                run.memory = groups[run.contender].memory()
    alone = median(step.seconds for step in runs[0].counted)
    rows = []
    for run in runs:
        if run.error or run.memory is None:
            continue
        seconds = median(step.seconds for step in run.counted)
        worst = max(abs(x / y - 1) for x, y in zip(run.losses, runs[0].losses, strict=True))
        rows.append(
            [
                run.contender,
                f"{1e3 * seconds:.4g} ms",
                f"{alone / seconds:.2f}",
                f"{1e3 * median(step.cpu for step in run.counted):.4g} ms",
                f"{(run.memory.peak - run.memory.imported) / MIB:.0f} MiB",
                f"equal to {worst:.0e}" if worst else "bit for bit",
            ]
        )
    headings = ("a step of", "median", "speed", "processor time", "above imports", "losses")
    Report(
        name="residuals",
        title="Attention residuals over four CPU devices, beside peers",
        settings={
            "model": CASE.title,
            "micro-batches": CASE.microbatches,
            "rounds": rounds,
            "peers": "are given four parts that hand all values on; "
            "fxpipe is given the model and the cuts",
        },
        figures=[
            *crossing(),
            *(
                Figure(f"{run.contender} cannot run it", " ".join(run.error.split()))
                for run in runs
                if run.error
            ),
        ],
        machine=machine,
        grids=[Grid(headings, rows)],
        samples={run.contender: [step.seconds for step in run.counted] for run in runs},
    ).publish()


def crossing() -> list[Figure]:
    """Bytes between stages in a step, values and gradients, and those kept for later stages."""
    model, x, y = CASE.make()
    with fxpipe.compile(
        model,
        ["cpu"] * CASE.devices,
        microbatches=CASE.microbatches,
        loss=CASE.loss,
        optimizer=CASE.optimizer,
        partition=list(CASE.cuts),
    ) as pipe:
        pipe.prepare(x, target=y)
        acts = [edge for edge in pipe.plan.edges if edge.kind == "act"]
        ours = [size for size in map(pipe.plan.bytes_of, acts) if size is not None]
        assert len(ours) == len(acts)
    assert CASE.parts is not None
    parts, given = CASE.parts(model), (x.tensor_split(CASE.microbatches)[0],)
    theirs = 0
    with torch.no_grad():
        for part in parts[:-1]:
            given = part(*given)
            theirs += sum(value.nbytes for value in given)
    both = 2 * CASE.microbatches / MIB
    return [
        Figure("between stages in a step, fxpipe", both * sum(ours), "MiB"),
        Figure("between stages in a step, parts that hand all values on", both * theirs, "MiB"),
    ]


if __name__ == "__main__":
    main()
