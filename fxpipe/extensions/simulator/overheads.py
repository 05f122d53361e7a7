"""Learn from the times of steps how long tasks take, and which overheads the machine adds.

The overheads are measured once on a machine, in steps of a pipe over two devices, and kept.
"""

from __future__ import annotations

import platform
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain as joined
from itertools import pairwise
from math import sqrt
from operator import itemgetter
from queue import SimpleQueue
from statistics import mean, median, quantiles, stdev
from time import perf_counter
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from fxpipe.extensions.simulator.costs import Overheads, Rehearsal
from fxpipe.extensions.simulator.simulate import simulate
from fxpipe.extensions.simulator.sums import begins, beside
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.unroll import unroll
from fxpipe.ir.value import Buffer
from fxpipe.kernels.kernel import BackwardResult, ForwardResult
from fxpipe.passes.lowering.chain import chain, chain_program
from fxpipe.runtime.devices.backend import Backend, Worker
from fxpipe.runtime.host import Job
from fxpipe.runtime.run import FlushedRun
from fxpipe.runtime.weights.live import LiveWeights
from fxpipe.torchtools.kept import kept
from fxpipe.torchtools.state import processors

_STEPS, _MICROBATCHES = 12, 8
"""To measure overheads: the steps in a round, and the micro-batches in each."""

_ROUNDS, _AFTER = 4, 3
"""The rounds; and how many steps in a row give a median to compare with earlier steps."""

_WIDTH = 192
"""Rows and columns of the matrices that a task multiplies if it has work to do."""

_STUDENT = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.9, 1.86, 1.83, 1.81)
"""Degrees of freedom, from 1 → Student's t that nine of ten differences stay below."""

_AT_ONCE = ins.Load, ins.Output, ins.Send, ins.Stash, ins.Free
"""Instructions that neither compute nor wait."""


class StepTimes(NamedTuple):
    """The times of a step, or of several in a row.

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
    apart: bool = False,
) -> Rehearsal:
    """Learn from some runs of a program how long its tasks and instructions take.

    Only the middle half of the runs counts, and a simulation with the result takes as long as
    these. An instruction begins when its thread has finished the one before. A transfer to or from
    offloaded memory took at most until an instruction had waited for it; the quickest transfer of
    a stage counts.

    Args:
        known: the overheads of the machine, for those that the runs do not show.
        serial: whether one thread runs the lists of all devices.
        steps: how many steps each run has.
        shares: stage → the share of its update that ran, if that is not all of it.
        apart: whether each device has a process of its own. The time of a hand-over is then not
            known before, and taken from the runs.
    """
    lists = (unroll(program, steps) if steps > 1 or program.depth else program).lists
    tasks: dict[tuple[str, int], list[float]] = defaultdict(list)
    short: list[float] = []
    transfers: dict[tuple[str, int], float] = {}
    middle = sorted(took, key=itemgetter(0))[len(took) // 4 : len(took) - len(took) // 4]
    for run in middle:
        lanes = [
            [*zip(times[::2], times[1::2], list_, strict=True)]
            for times, list_ in zip(run.times, lists, strict=True)
        ]
        for lane in [sorted(joined(*lanes), key=itemgetter(0))] if serial else lanes:
            before = lane[0][0] if lane else 0
            begun: dict[Buffer, float] = {}
            idle: dict[tuple[str, int], float] = {}  # since when nothing is stored, or fetched
            for _, end, instruction in lane:
                seconds, before = 1e-9 * (end - before), end
                letter = instruction.letter
                moved = beside(instruction)
                if (copy := begins(instruction)) is not None:
                    begun[copy] = end
                elif moved is not None:
                    way = "O" if moved.kind == "offloaded" else "P"
                    on = way, program.device_of(moved.source, moved.microbatch)
                    transfer = 1e-9 * (end - max(begun.pop(moved), idle.get(on, 0)))
                    idle[on], key = end, (way, moved.source)
                    transfers[key] = min(transfers.get(key, transfer), transfer)
                if letter is not None:
                    tasks[letter, instruction.stage].append(seconds)
                elif isinstance(instruction, _AT_ONCE) and moved is None:
                    short.append(seconds)
    overhead = mean(short) if short else known.instruction
    if apart:
        waits = [wait for run in middle for wait in _hand_overs(lists, run.times)]
        known = replace(known, hand_over=max(median(waits) - overhead, 0.0) if waits else 0.0)
    costs = {key: mean(times) for key, times in tasks.items()}
    costs |= {key: max(seconds - overhead, 0.0) for key, seconds in transfers.items()}
    machine = Overheads(overhead, known.task, known.hand_over)
    ran = Rehearsal(costs, machine, serial)
    run_time = simulate(
        program, ran.known, links=ran.links, overhead=overhead, serial=serial, steps=steps
    ).makespan
    outside = max(mean(run.seconds for run in middle) - run_time, 0.0) / steps
    costs |= {("U", s): costs["U", s] / share for s, share in shares.items() if ("U", s) in costs}
    machine = replace(machine, step=outside, error=known.error)
    return Rehearsal(costs, machine, serial, spread([run.seconds for run in took]) + known.error)


def _hand_overs(
    lists: Sequence[Sequence[ins.Instruction]], times: Sequence[Sequence[int]]
) -> Iterator[float]:
    """Yield, for each value that a device waited for, the seconds from the end of its send to the
    end of its receive."""
    sent = {
        instruction.buffer: end
        for list_, ends in zip(lists, times, strict=True)
        for instruction, end in zip(list_, ends[1::2], strict=True)
        if isinstance(instruction, ins.Sending)
    }
    for list_, ran in zip(lists, times, strict=True):
        for instruction, begin, end in zip(list_, ran[::2], ran[1::2], strict=True):
            if isinstance(instruction, ins.Receiving) and begin < sent[instruction.buffer]:
                yield 1e-9 * max(end - sent[instruction.buffer], 0)


def spread(seconds: Sequence[float]) -> float:
    """The share by which one more time differs from the mean of these, at most in nine of ten
    cases."""
    count = len(seconds)
    if count < 2:
        return 0.0
    student = _STUDENT[min(count - 1, len(_STUDENT)) - 1]
    return student * stdev(seconds) * sqrt(1 + 1 / count) / mean(seconds)


@cache
def overheads() -> Overheads:
    """The overheads of this machine: measured once on it and kept, except for the hand-over, which
    is measured in each process."""
    measured = kept(f"least {Overheads()} on {_here()}", _measured_overheads)
    return Overheads(**measured, hand_over=hand_over())


def _here() -> tuple[object, ...]:
    """What distinguishes this machine from others."""
    return platform.node(), processors(), platform.python_version(), str(torch.__version__)


@cache
def away_rates(place: str) -> tuple[float, float]:
    """The bytes per second that a device of this type offloads, and that it fetches again: measured
    once on this machine for each folder of temporary files, and kept."""
    what = f"away {place} {tempfile.gettempdir()} on {_here()}"
    stored, fetched = kept(what, lambda: _measured_rates(place))
    return stored, fetched


def _measured_rates(place: str) -> tuple[float, float]:
    from fxpipe.extensions.offload.storing import FileMemory

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
        return ForwardResult([self._result()], [], [])

    def backward(self, saved: Any, gradients: Any, totals: Any = ()) -> BackwardResult:
        return BackwardResult([self._result()] * self._gradients, [])  # type: ignore[list-item]

    def _result(self) -> torch.Tensor | None:
        return None if self._matrix is None else self._matrix @ self._matrix


def _measured_overheads() -> dict[str, float]:
    """Measure all overheads except for the hand-over, in steps of a pipe over two devices."""
    program = chain_program(find_recipe("1f1b")(2, _MICROBATCHES))
    workers = [Worker(f"fxpipe-measure-{i}", 1) for i in range(2)]
    rounds: dict[str, list[float]] = {"instruction": [], "task": [], "step": [], "error": []}
    try:
        for _ in range(_ROUNDS):
            empty = learned(program, _steps(program, workers[:1]), Overheads(), serial=True)
            rounds["instruction"].append(empty.overheads.instruction)
            rounds["task"].append(mean(empty.costs.values()))
            rounds["step"].append(empty.overheads.step)
            times = [took.seconds for took in _steps(program, workers, torch.ones(_WIDTH, _WIDTH))]
            before, after = mean(times[: _STEPS // 2]), times[_STEPS // 2 :]
            later = [median(after[i : i + _AFTER]) for i in range(len(after) - _AFTER + 1)]
            errors = [max(time / before, before / time) - 1 for time in later]
            rounds["error"].append(quantiles(errors, n=10, method="inclusive")[-1])
    finally:
        for worker in workers:
            worker.close()
    # the minimum, as it is kept and must not depend on what else the machine does now
    return {name: min(values) for name, values in rounds.items()}


def _steps(
    program: Program, workers: Sequence[Worker], matrix: torch.Tensor | None = None
) -> list[StepTimes]:
    """Time steps of a pipe whose stages multiply this matrix, after one step that warms up."""
    plan = chain(2)
    host: Any = SimpleNamespace(
        give=lambda buffer: matrix, take=lambda buffer, value: None, wants=lambda buffer: False
    )
    kernels: Any = [[_Work(0, matrix), _Work(1, matrix)]] * _MICROBATCHES
    job, backend, runs = Job(kernels, host, None, ()), Backend(), []
    for _ in range(_STEPS + 1):
        times: list[list[int]] = [[], []]
        weights = LiveWeights(plan.stages, {}, [None, None], onto_grad=False)
        start = perf_counter()
        run = FlushedRun(program, plan, workers, backend, weights, times=times)
        run.feed(job)
        run.advance(lambda: None)
        runs.append(StepTimes(perf_counter() - start, times))
    return runs[1:]


_HAND_ROUNDS, _HAND_TURNS = 15, 40
"""To time a hand-over: the rounds, of which the lower quartile counts, and the turns in each."""


@cache
def hand_over() -> float:
    """Seconds from when one thread starts to wait until the thread that it woke goes on.

    Measured once, which takes some hundredths of a second. The lower quartile of the rounds counts,
    so that other work on the machine matters little.
    """
    there, back = SimpleQueue[None](), SimpleQueue[None]()
    exchanges = range(_HAND_ROUNDS * _HAND_TURNS)

    def answer() -> None:
        for _ in exchanges:
            back.put(there.get())

    thread = threading.Thread(target=answer, name="fxpipe-measure", daemon=True)
    thread.start()
    times = [perf_counter()]
    for _ in range(_HAND_ROUNDS):
        for _ in range(_HAND_TURNS):
            there.put(None)
            back.get()
        times.append(perf_counter())
    thread.join()
    rounds = sorted(after - before for before, after in pairwise(times))
    return rounds[_HAND_ROUNDS // 4] / (2 * _HAND_TURNS)
