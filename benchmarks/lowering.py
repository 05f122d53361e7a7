"""Time lowering, streams and verifying of schedules, and compare torch.distributed.pipelining.

Everything runs on one thread. Times are CPU times, which other processes hardly change.

Run it with ``python -m benchmarks.lowering`` on an idle machine.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import process_time
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx, nn
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.nn.functional import mse_loss

import fxpipe
from benchmarks.machine import describe
from benchmarks.report import Figure, Report
from fxpipe.extensions.ranks.program import OwnProgram
from fxpipe.extensions.streams.events import Streams
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.value import HOST, Edge
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower

PEERS: dict[str, Callable[..., Any]] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}
"""Our schedule → the same in torch.distributed.pipelining."""

SIZES = ((8, 2048), (64, 256))
"""Devices, with two stages each, and micro-batches."""

GROWTH = (64, 256, 1024, 4096, 6400)
"""Micro-batches of the runs that show how time grows, over 8 devices."""

STAGES, MICROBATCHES = 64, 256
"""Of the runs that show what a rank does and keeps where there are many."""


Result = TypeVar("Result")


class Ours(NamedTuple):
    """Seconds, and instructions."""

    made: float
    lowered: float
    verified: float
    streams: float
    instructions: int


def timed(function: Callable[[], Result]) -> tuple[Result, float]:
    """What it returns, and the seconds that it took of the processor."""
    start = process_time()
    result = function()
    return result, process_time() - start


def chain(stages: int) -> Plan:
    """A plan of empty stages, each of which hands one value to the next."""
    ends = [HOST, *range(stages), HOST]
    edges = [Edge(ends[k], ends[k + 1], f"v{k}") for k in range(stages + 1)]
    graph = fx.Graph()
    graph.output(())
    module = fx.GraphModule(torch.nn.Module(), graph)
    back = tuple(edge.back for edge in edges[1:])
    return Plan(tuple(Stage(k, (), (), (), module) for k in range(stages)), tuple(edges), back)


def lower(schedule: Schedule, plan: Plan) -> Program:
    return free(communicate(Lower(plan)(schedule)))


def ours(name: str, devices: int, microbatches: int, rounds: int) -> Ours:
    """Medians of making the schedule, of all passes, of verifying schedule and program, and of
    making streams."""
    runs = [once(name, devices, microbatches) for _ in range(rounds)]
    return Ours(
        median(run.made for run in runs),
        median(run.lowered for run in runs),
        median(run.verified for run in runs),
        median(run.streams for run in runs),
        runs[0].instructions,
    )


def once(name: str, devices: int, microbatches: int) -> Ours:
    gc.collect()
    schedule, made = timed(lambda: find_recipe(name)(devices, microbatches))
    plan = chain(schedule.stages)
    program, lowered = timed(lambda: lower(schedule, plan))
    _, verified = timed(lambda: (schedule.verify(), program.verify()))
    _, streams = timed(lambda: Streams()(program))
    return Ours(made, lowered, verified, streams, sum(map(len, program.lists)))


def theirs(name: str, devices: int, microbatches: int) -> tuple[float, int]:
    """Seconds of making and lowering the same schedule for all ranks, and the actions made."""
    stages = [
        SimpleNamespace(
            group_size=devices,
            group_rank=0,
            num_stages=2 * devices,
            stage_index=stage,
            is_last=stage == 2 * devices - 1,
            submod=None,
        )
        for stage in (0, 2 * devices - 1 if name == "zb-v" else devices)
    ]
    gc.collect()
    schedule, seconds = timed(lambda: PEERS[name](stages, microbatches))
    return seconds, sum(map(len, schedule.pipeline_order_with_comms.values()))


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of the line through the points in logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    middle = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - middle[0]) * (b - middle[1]) for a, b in zip(x, y, strict=True))
    return above / sum((a - middle[0]) ** 2 for a in x)


def memory(microbatches: int) -> float:
    """Bytes an instruction at the peak of making, lowering and verifying."""
    plan = chain(16)
    gc.collect()
    tracemalloc.start()
    schedule = find_recipe("interleaved-1f1b")(8, microbatches)
    program = lower(schedule, plan)
    schedule.verify()
    program.verify()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / sum(map(len, program.lists))


def beside(rounds: int) -> list[Figure]:
    """Each schedule and size, ours and theirs."""
    figures = []
    for devices, microbatches in SIZES:
        for name in PEERS:
            what = f"{name}, {devices} devices × 2 stages × {microbatches} micro-batches"
            own = ours(name, devices, microbatches, rounds)
            peer, actions = theirs(name, devices, microbatches)
            figures += [
                Figure(f"{what}: made", own.made, "s"),
                Figure(f"{what}: lowered", own.lowered, "s"),
                Figure(f"{what}: verified", own.verified, "s"),
                Figure(f"{what}: given streams", own.streams, "s"),
                Figure(f"{what}: instructions", own.instructions),
                Figure(f"{what}: torch.distributed.pipelining, made and lowered", peer, "s"),
                Figure(f"{what}: torch.distributed.pipelining, actions", actions),
            ]
    return figures


def growth(rounds: int) -> list[Figure]:
    """How time grows with the number of instructions, and what a million of them take."""
    runs = [ours("interleaved-1f1b", 8, microbatches, rounds) for microbatches in GROWTH]
    sizes = [run.instructions for run in runs]
    span = f"from {sizes[0]} to {sizes[-1]} instructions"
    schedule = find_recipe("interleaved-1f1b")(8, GROWTH[-1])
    program = lower(schedule, chain(schedule.stages))
    _, simulated = timed(program.simulate)
    return [
        Figure(f"exponent of lowering, {span}", exponent(sizes, [r.lowered for r in runs])),
        Figure(f"exponent of verifying, {span}", exponent(sizes, [r.verified for r in runs])),
        Figure(f"exponent of giving streams, {span}", exponent(sizes, [r.streams for r in runs])),
        Figure(f"{sizes[-1]} instructions: lowered", runs[-1].lowered, "s"),
        Figure(f"{sizes[-1]} instructions: verified", runs[-1].verified, "s"),
        Figure(f"{sizes[-1]} instructions: given streams", runs[-1].streams, "s"),
        Figure(f"{sizes[-1]} instructions: simulated", simulated, "s"),
        Figure("memory an instruction, all together, at its peak", memory(1024), "bytes"),
    ]


def at_scale() -> list[Figure]:
    """All that a rank does on paper for 64 stages, and how much of it a rank keeps."""
    figures = []
    for name in ("1f1b", "zb-h1"):
        what = f"{name}, {STAGES} devices × 1 stage × {MICROBATCHES} micro-batches"
        pipe, made = timed(partial(compiled, name))
        program = pipe.program
        _, checked = timed(partial(program.verify, channel=1))
        _, simulated = timed(partial(simulated_of, pipe))
        _, printed = timed(program.__str__)
        pipe.close()
        whole, own = kept(name)
        figures += [
            Figure(f"{what}: compiled: traced, planned, lowered, each verified", made, "s"),
            Figure(f"{what}: verified with one value on its way at a time", checked, "s"),
            Figure(f"{what}: simulated, with the memory of every device", simulated, "s"),
            Figure(f"{what}: printed, for ranks to compare", printed, "s"),
            Figure(f"{what}: all of it", made + checked + simulated + printed, "s"),
            Figure(f"{what}: instructions of all ranks", sum(map(len, program.lists))),
            Figure(
                f"{what}: instructions that a rank keeps, at most", max(map(len, program.lists))
            ),
            Figure(f"{what}: memory of the instructions of all ranks", whole / 2**20, "MiB"),
            Figure(f"{what}: memory of those that a rank keeps", own / 2**20, "MiB"),
        ]
    return figures


def compiled(name: str) -> fxpipe.Pipeline:
    """A pipe whose stages have next to no work."""
    x = torch.ones(MICROBATCHES, 8)
    return fxpipe.compile(
        nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(STAGES))),
        STAGES,
        schedule=name,
        microbatches=MICROBATCHES,
        loss=mse_loss,
        optimizer=torch.optim.Adam,
        example=((x,), {"target": x}),
    )


def simulated_of(pipe: fxpipe.Pipeline) -> None:
    """Simulate a step, with all that it tells."""
    found = pipe.simulate()
    _ = found.makespan, found.bubble, found.memory


def kept(name: str) -> tuple[int, int]:
    """The bytes of the instructions of all ranks, and of those that the rank in the middle keeps.

    Ranks compile in processes of their own; here it is one of them.
    """
    schedule = find_recipe(name)(STAGES, MICROBATCHES)
    plan = chain(STAGES)
    gc.collect()
    tracemalloc.start()
    program = lower(schedule, plan)
    gc.collect()
    whole, _ = tracemalloc.get_traced_memory()
    program = OwnProgram.of(program, STAGES // 2)
    gc.collect()
    own, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return whole, own


def main() -> int:
    parser = argparse.ArgumentParser(description="Time lowering and verifying of schedules.")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    machine = describe()
    figures = [*beside(rounds), *growth(rounds), *at_scale()]
    settings = {
        "plan": "stages without work, each hands one value to the next",
        "time": "of the processor; all of it runs on one thread",
        "rounds": f"{rounds} of ours, of which the median is told; 1 of theirs",
        "growth": "interleaved-1f1b, 8 devices × 2 stages, micro-batches "
        + ", ".join(map(str, GROWTH)),
        f"{STAGES} devices × 1 stage": f"a pipe of {STAGES} linear layers of width 8 and its Adam; "
        "a rank does all of this in its own process, side by side with the others",
    }
    Report("lowering", "Lowering and verifying schedules", settings, figures, machine).publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
