"""What steps teach: how long tasks take as they run, and what a machine takes besides.

The latter is measured once on a machine and kept, in steps of a pipe over two devices.
"""

from __future__ import annotations

import platform
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain as joined
from math import sqrt
from operator import itemgetter
from statistics import mean, median, quantiles, stdev
from time import perf_counter
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.unroll import unroll
from fxpipe.ir.value import Buffer
from fxpipe.kernels.kernel import BackwardResult, ForwardResult
from fxpipe.passes.inductor.libraries import Libraries
from fxpipe.runtime import choice
from fxpipe.runtime.devices.backend import Backend, Worker
from fxpipe.runtime.host import Job
from fxpipe.runtime.offload import FileMemory
from fxpipe.runtime.run import FlushedRun
from fxpipe.runtime.weights.live import LiveWeights
from fxpipe.simulator.costs import Overheads, Rehearsal
from fxpipe.simulator.simulate import chain, chain_program, simulate
from fxpipe.simulator.sums import beside
from fxpipe.torchtools.state import processors

_STEPS, _MICROBATCHES = 12, 8
"""Steps in a round, and micro-batches in each, that overheads are measured in."""

_ROUNDS, _AFTER = 4, 3
"""Rounds; and of how many steps the median is compared with what earlier steps predict."""

_WIDTH = 192
"""Rows and columns of the matrices that a task multiplies where there is work to do."""

_STUDENT = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.9, 1.86, 1.83, 1.81)
"""Student's t that nine of ten differences stay below, by degrees of freedom from 1."""

_AT_ONCE = ins.Load, ins.Output, ins.Send, ins.Stash, ins.Free
"""Instructions that neither compute nor wait."""


class StepTimes(NamedTuple):
    """What a step, or several in a row, took.

    Attributes:
        seconds: from the call to the return.
        times: device → start and end of each of its instructions, in nanoseconds.
    """

    seconds: float
    times: Sequence[Sequence[int]]


def learned(
    program: Program,
    took: Sequence[StepTimes],
    known: Overheads,
    *,
    serial: bool = False,
    steps: int = 1,
    shares: Mapping[int, float] = MappingProxyType({}),
) -> Rehearsal:
    """How long tasks and instructions of a program take, from the middle half of some runs of it,
    so that its simulation takes as long as these. An instruction begins where its thread has
    finished the one before. What is stored or fetched took at most until somebody had waited for
    it, and as long as the quickest of its stage.

    Args:
        program: the program that ran.
        took: its runs.
        known: overheads, for what these do not show.
        serial: whether one thread runs the lists of all devices.
        steps: how many steps each run has.
        shares: stage → the share of its update that ran, where that is not all of it.
    """
    lists = (unroll(program, steps) if steps > 1 or program.depth else program).lists
    tasks: dict[tuple[str, int], list[float]] = defaultdict(list)
    others: list[float] = []
    away: dict[tuple[str, int], float] = {}
    middle = _middle(took)
    for run in middle:
        lanes = [
            [*zip(own[::2], own[1::2], list_, strict=True)]
            for own, list_ in zip(run.times, lists, strict=True)
        ]
        for lane in [sorted(joined(*lanes), key=itemgetter(0))] if serial else lanes:
            before = lane[0][0] if lane else 0
            begun: dict[Buffer, float] = {}
            idle: dict[tuple[str, int], float] = {}  # since when nothing is stored, or fetched
            for _, end, instruction in lane:
                seconds, before = 1e-9 * (end - before), end
                letter = ins.letter_of(instruction)
                if isinstance(instruction, ins.Offload | ins.Prefetch):
                    begun[instruction.buffer] = end
                elif (moved := beside(instruction)) is not None:
                    way = "O" if moved.kind == "offloaded" else "P"
                    on = way, program.device_of(moved.source, moved.microbatch)
                    took_ = 1e-9 * (end - max(begun.pop(moved), idle.get(on, 0)))
                    idle[on], key = end, (way, moved.source)
                    away[key] = min(away.get(key, took_), took_)
                if letter is not None:
                    tasks[letter, instruction.stage].append(seconds)  # type: ignore[union-attr]
                elif isinstance(instruction, _AT_ONCE) and beside(instruction) is None:
                    others.append(seconds)
    each = mean(others) if others else known.instruction
    costs = {key: mean(own) for key, own in tasks.items()}
    costs |= {key: max(seconds - each, 0.0) for key, seconds in away.items()}
    made = Rehearsal(costs, Overheads(each, known.task, known.hand_over), serial)
    found = simulate(
        program, made.known, links=made.links, overhead=each, serial=serial, steps=steps
    )
    whole = mean(run.seconds for run in middle)
    outside = max(whole - found.makespan, 0.0) / steps
    costs |= {("U", s): costs["U", s] / share for s, share in shares.items() if ("U", s) in costs}
    every = [run.seconds for run in took]
    overheads = Overheads(each, known.task, known.hand_over, outside, known.error)
    return Rehearsal(costs, overheads, serial, spread(every) + known.error)


def _middle(took: Sequence[StepTimes]) -> Sequence[StepTimes]:
    """The half that is neither quick nor slow."""
    ordered = sorted(took, key=itemgetter(0))
    return ordered[len(took) // 4 : len(took) - len(took) // 4]


def spread(seconds: Sequence[float]) -> float:
    """By which share one more time differs from the mean of these, in nine of ten cases."""
    count = len(seconds)
    if count < 2:
        return 0.0
    student = _STUDENT[min(count - 1, len(_STUDENT)) - 1]
    return student * stdev(seconds) * sqrt(1 + 1 / count) / mean(seconds)


@cache
def overheads() -> Overheads:
    """Those of this machine; measured once on it and kept, but for the hand-over, which is measured
    in each process."""
    kept = Libraries().kept(f"least {Overheads()} on {_here()}", _measured_overheads)
    return Overheads(**kept, hand_over=choice.hand_over())


def _here() -> tuple[object, ...]:
    """What tells this machine from others."""
    return platform.node(), processors(), platform.python_version(), str(torch.__version__)


@cache
def away_rates(place: str) -> tuple[float, float]:
    """Bytes a second that a device of this type stores outside of its memory, and that it fetches
    again; measured once on this machine, and for each folder of temporary files, and kept."""
    what = f"away {place} {tempfile.gettempdir()} on {_here()}"
    stored, fetched = Libraries().kept(what, lambda: _measured_rates(place))
    return stored, fetched


def _measured_rates(place: str) -> tuple[float, float]:
    memory = torch.ones(1 << 25, dtype=torch.uint8, device=place)
    stored, fetched = [], []
    for _ in range(_ROUNDS):
        start = perf_counter()
        if memory.is_cpu:
            away = FileMemory(-1, [memory])
            away.wait()
            between = perf_counter()
            away.fetch()
            away.wait()
        else:
            pinned = torch.empty_like(memory, device="cpu", pin_memory=True)
            start = perf_counter()
            pinned.copy_(memory)
            between = perf_counter()
            memory.copy_(pinned)
            torch.accelerator.synchronize()
        stored.append(between - start)
        fetched.append(perf_counter() - between)
    return memory.nbytes / min(stored), memory.nbytes / min(fetched)


class _Work:
    """A kernel that multiplies a matrix by itself, or computes nothing."""

    parameter_strides = ()

    def __init__(self, gradients: int, matrix: torch.Tensor | None = None) -> None:
        self._gradients, self._matrix = gradients, matrix

    def forward(self, parameters: Any, buffers: Any, inputs: list[Any]) -> ForwardResult:
        inputs.clear()
        return ForwardResult([self._made()], [], [])

    def backward(self, saved: Any, gradients: Any, totals: Any = ()) -> BackwardResult:
        return BackwardResult([self._made()] * self._gradients, [])  # type: ignore[list-item]

    def _made(self) -> torch.Tensor | None:
        return None if self._matrix is None else self._matrix @ self._matrix


def _measured_overheads() -> dict[str, float]:
    """From steps of a pipe over two devices: all but the hand-over."""
    program = chain_program(find_recipe("1f1b")(2, _MICROBATCHES))
    workers = [Worker(f"fxpipe-measure-{i}", 1) for i in range(2)]
    found: dict[str, list[float]] = {"instruction": [], "task": [], "step": [], "error": []}
    try:
        for _ in range(_ROUNDS):
            least = learned(program, _steps(program, workers[:1]), Overheads(), serial=True)
            found["instruction"].append(least.overheads.instruction)
            found["task"].append(mean(least.costs.values()))
            found["step"].append(least.overheads.step)
            each = [took.seconds for took in _steps(program, workers, torch.ones(_WIDTH, _WIDTH))]
            before, after = mean(each[: _STEPS // 2]), each[_STEPS // 2 :]
            later = [median(after[i : i + _AFTER]) for i in range(len(after) - _AFTER + 1)]
            errors = [max(one / before, before / one) - 1 for one in later]
            found["error"].append(quantiles(errors, n=10, method="inclusive")[-1])
    finally:
        for worker in workers:
            worker.close()
    # the least: it is kept, and must not depend on what else the machine does now
    return {name: min(own) for name, own in found.items()}


def _steps(
    program: Program, workers: Sequence[Worker], matrix: torch.Tensor | None = None
) -> list[StepTimes]:
    """Steps of a pipe whose stages have this work in them, after one that warms up."""
    plan = chain(2)
    host: Any = SimpleNamespace(
        give=lambda buffer: matrix, take=lambda buffer, value: None, wants=lambda buffer: False
    )
    kernels: Any = [[_Work(0, matrix), _Work(1, matrix)]] * _MICROBATCHES
    job, backend, made = Job(kernels, host, None, ()), Backend(), []
    for _ in range(_STEPS + 1):
        times: list[list[int]] = [[], []]
        weights = LiveWeights(plan.stages, {}, [None, None], onto_grad=False)
        start = perf_counter()
        run = FlushedRun(program, plan, workers, backend, weights, times=times)
        run.feed(job)
        run.advance(lambda: None)
        made.append(StepTimes(perf_counter() - start, times))
    return made[1:]
