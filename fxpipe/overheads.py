"""What a machine takes besides the work of tasks: measured once on it and kept.

Steps of a pipe over two devices that has no work in it run on one thread.
"""

from __future__ import annotations

import platform
from functools import cache
from statistics import mean
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import torch

from fxpipe.ir import instruction as ins
from fxpipe.ir.recipe import find_recipe
from fxpipe.kernels.kernel import Backwarded, Forwarded
from fxpipe.passes.inductor.libraries import Libraries
from fxpipe.runtime import choice
from fxpipe.runtime.devices.backend import Backend, Worker
from fxpipe.runtime.host import Job
from fxpipe.runtime.run import FlushedRun
from fxpipe.runtime.weights.live import LiveWeights
from fxpipe.simulator.costs import Overheads
from fxpipe.simulator.simulate import chain, chain_program
from fxpipe.torchtools.state import processors

_STEPS, _MICROBATCHES = 30, 8
"""Steps without work, and micro-batches in each, that overheads are measured in."""


@cache
def overheads() -> Overheads:
    """Those of this machine; measured once on it and kept, but for the hand-over, which is measured
    in each process."""
    here = platform.node(), processors(), platform.python_version(), str(torch.__version__)
    kept = Libraries().kept(f"least {Overheads()} on {here}", _measured_overheads)
    return Overheads(**kept, hand_over=choice.hand_over())


class _NoWork:
    """A kernel that computes nothing."""

    def __init__(self, gradients: int) -> None:
        self._gradients = gradients

    def forward(self, parameters: Any, buffers: Any, inputs: list[Any]) -> Forwarded:
        inputs.clear()
        return Forwarded([None], [], [])

    def backward(self, saved: Any, gradients: Any, totals: Any = ()) -> Backwarded:
        return Backwarded([None] * self._gradients, [])  # type: ignore[list-item]


def _measured_overheads() -> dict[str, float]:
    """From steps of a pipe over two devices that has no work in it: all but the hand-over."""
    plan, program = chain(2), chain_program(find_recipe("1f1b")(2, _MICROBATCHES))
    host: Any = SimpleNamespace(
        give=lambda buffer: None, take=lambda buffer, value: None, wants=lambda buffer: False
    )
    kernels: Any = [[_NoWork(0), _NoWork(1)]] * _MICROBATCHES
    job = Job(kernels, host, None, ())
    every = [instruction for own in program.lists for instruction in own]
    worker = Worker("fxpipe-measure", 1)
    found: dict[str, list[float]] = {"instruction": [], "task": [], "step": []}
    try:
        for _ in range(_STEPS):
            times: list[list[int]] = [[], []]
            weights = LiveWeights(plan.stages, {}, [None, None], onto_grad=False)
            start = perf_counter_ns()
            run = FlushedRun(program, plan, [worker], Backend(), weights, times=times)
            run.feed(job)
            run.advance(lambda: None)
            seconds = perf_counter_ns() - start
            spans = [pair for own in times for pair in zip(own[::2], own[1::2], strict=True)]
            inside = max(end for _, end in spans) - min(start for start, _ in spans)
            between = (inside - sum(end - start for start, end in spans)) / len(spans)
            apart: dict[bool, list[int]] = {True: [], False: []}
            for instruction, (start, end) in zip(every, spans, strict=True):
                apart[ins.letter_of(instruction) is not None].append(end - start)
            found["instruction"].append(mean(apart[False]) + between)
            found["task"].append(mean(apart[True]) + between)
            found["step"].append(seconds - inside)
    finally:
        worker.close()
    # the least: it is kept, and must not depend on what else the machine does now
    return {name: 1e-9 * min(own) for name, own in found.items()}
