"""Measure how much of the copies runs while the GPU computes, by the pipe's profile and by kernels.

The profile has the times of instructions, from events on their streams; the result is the share of
a device's arrivals that its own tasks hide. torch.profiler has the times and streams of kernels;
the result is the share of copies on copy-only streams that kernels of other streams hide. The batch
stays on the host, so that loading it counts.
Run it with ``python -m benchmarks.gpu.overlap``; see the README beside it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import fxpipe
from benchmarks.gpu.groups import split
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.setting import HOW, Setting, add_dispatch, arguments, read
from benchmarks.gpu.workloads import NAMES, Workload, workload
from benchmarks.report import Figure, Grid
from fxpipe.extensions.simulator import Simulation
from fxpipe.extensions.simulator.measured import measured_run
from fxpipe.extensions.simulator.unroll import unroll
from fxpipe.ir.instruction import Arrival
from fxpipe.ir.program import Program

WARM_UP = 3
STEPS = 3
"""Steps that are profiled."""

TITLE = "Copies that run under computations"

SGD = partial(torch.optim.SGD, lr=1e-4)
Spans = Sequence[tuple[float, float]]
"""Start and end of each, in any order."""


class Covered(NamedTuple):
    """The time of copies, in seconds, and what of it was under computations."""

    copies: float
    under: float

    @property
    def share(self) -> float | None:
        return self.under / self.copies if self.copies else None


class Lane(NamedTuple):
    """What a stream of the GPU did."""

    name: str
    copies: Spans
    kernels: Spans


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a row is missing, or the GPU cannot be split."""
    parser = arguments(str(__doc__).partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["unet"])
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b"])
    parser.add_argument("--devices", type=int, help="by default 4, in a dry run 2")
    parser.add_argument("--microbatches", type=int, help="by default 16, in a dry run 4")
    parser.add_argument("--batch", type=int, help="samples per step; by default the model's own")
    add_dispatch(parser)
    setting, own = read(parser, given)
    count = own.devices or (2 if setting.dry_run else 4)
    parts = own.microbatches or (4 if setting.dry_run else 16)
    try:
        groups = split(setting, count)
    except Exception as error:  # whatever the driver's bindings raise
        rows = Rows(setting, "overlap", TITLE, {})
        rows.lose("groups of multiprocessors", error)
        return rows.end()
    settings: dict[str, str | int] = {
        "batches": ", ".join(str(workload(n, setting, own.batch).batch) for n in own.models),
        "micro-batches": parts,
        "groups": f"{count} of {groups.multiprocessors} multiprocessors, {groups.how}",
        "launched by": HOW[own.dispatch],
        "profile": f"{STEPS} steps; arrivals on a device under that device's own tasks",
        "kernels": f"{STEPS} steps; streams that only copy under kernels of any other stream",
    }
    rows = Rows(setting, "overlap", TITLE, settings)
    cells: list[tuple[str, ...]] = []
    lanes: list[tuple[str, ...]] = []
    rows.grids += [
        Grid(("what", "measured by", "copies", "under computations", "share"), cells),
        Grid(("what", "stream", "copies", "kernels", "copying", "computing"), lanes),
    ]
    for name in own.models:
        work = workload(name, setting, own.batch)
        for schedule in own.schedules:
            what = f"{work.name}, {schedule}"
            compiled = partial(compile_, work, groups.devices, schedule, parts, own, setting)
            by_profile = rows.measure(f"{what}, profile", partial(profiled, compiled, work))
            by_kernels = rows.measure(f"{what}, kernels", partial(traced, compiled, work, setting))
            found = {"profile": by_profile}
            if by_kernels is not None:
                found["kernels"] = under(by_kernels)
                lanes += [(what, *_lane(lane)) for lane in by_kernels]
            for how, covered in found.items():
                if covered is None:
                    continue
                cells.append((what, how, *map(_milliseconds, covered), _percent(covered.share)))
                if covered.share is not None:
                    told = f"{what}: copies under computations, by {how}"
                    rows.figures.append(Figure(told, 100 * covered.share, "%"))
            rows.publish()
    return rows.end()


def compile_(
    work: Workload, devices: Sequence[Any], schedule: str, parts: int, own: Any, setting: Setting
) -> fxpipe.Pipeline:
    torch.manual_seed(0)
    return fxpipe.compile(
        work.model().to(setting.device),
        devices,
        schedule=schedule,
        extensions=[fxpipe.Dispatch(own.dispatch)],
        microbatches=parts,
        loss=work.loss,
        optimizer=SGD,
    )


def profiled(compiled: Any, work: Workload) -> Covered:
    """By the pipe's own profile, before it lays instructions one behind another."""
    x, y = work.draw(work.batch)
    kept: list[tuple[Program, Sequence[Sequence[int]]]] = []

    def keep(
        program: Program, steps: int, times: Sequence[Sequence[int]], *sizes: Any
    ) -> Simulation:
        kept.append((unroll(program, steps), times))
        return measured_run(program, steps, times, *sizes)

    with compiled() as pipe, mock.patch("fxpipe.extensions.simulator.pipe.measured_run", keep):
        for _ in range(WARM_UP):
            pipe.step(x, target=y)
        pipe.profile(x, target=y, steps=STEPS)
    return arrivals_under_tasks(*kept[0])


def arrivals_under_tasks(flat: Program, times: Sequence[Sequence[int]]) -> Covered:
    """Of all devices together, from start and end of each instruction in nanoseconds."""
    copies = below = 0.0
    for list_, own in zip(flat.lists, times, strict=True):
        spans = [(1e-9 * a, 1e-9 * b) for a, b in zip(own[::2], own[1::2], strict=True)]
        pairs = [*zip(list_, spans, strict=True)]
        tasks = [span for instruction, span in pairs if instruction.letter]
        arrivals = [span for instruction, span in pairs if isinstance(instruction, Arrival)]
        copies += sum(end - start for start, end in arrivals)
        below += covered(arrivals, tasks)
    return Covered(copies, below)


def traced(compiled: Any, work: Workload, setting: Setting) -> list[Lane]:
    """By the times of kernels. In a dry run operations of threads stand for kernels of streams."""
    x, y = work.draw(work.batch)
    kind = torch.profiler.ProfilerActivity
    activities = [kind.CPU] if setting.dry_run else [kind.CUDA]
    with compiled() as pipe, tempfile.TemporaryDirectory() as folder:
        for _ in range(WARM_UP):
            pipe.step(x, target=y)
        pipe.flush()
        setting.synchronize()
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            for _ in range(STEPS):
                pipe.step(x, target=y)
            pipe.flush()
            setting.synchronize()
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        found = lanes_of(json.loads(path.read_text())["traceEvents"], setting.dry_run)
    if not found:
        raise RuntimeError("torch.profiler saw no kernel; it may lack the right to trace the GPU")
    return found


def lanes_of(events: Iterable[Mapping[str, Any]], dry_run: bool = False) -> list[Lane]:
    """What a trace in Chrome's format has of each stream, in seconds."""
    kinds = ("cpu_op",) if dry_run else ("kernel", "gpu_memcpy", "gpu_memset")
    copies: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    kernels: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in kinds:
            continue
        stream = str(event["tid"] if dry_run else event["args"]["stream"])
        start = 1e-6 * event["ts"]
        span = start, start + 1e-6 * event["dur"]
        (copies if _copies(event) else kernels)[stream].append(span)
    return [Lane(name, copies[name], kernels[name]) for name in sorted({*copies, *kernels})]


def _copies(event: Mapping[str, Any]) -> bool:
    """A copy of what is not contiguous is a kernel, too."""
    name = event["name"].lower()
    return event["cat"] in ("gpu_memcpy", "gpu_memset") or "copy_" in name


def under(lanes: Sequence[Lane]) -> Covered:
    """The copies of streams that do nothing else, under the kernels of the others."""
    copies = [span for lane in lanes if not lane.kernels for span in lane.copies]
    kernels = [span for lane in lanes for span in lane.kernels]
    return Covered(sum(end - start for start, end in copies), covered(copies, kernels))


def covered(spans: Spans, by: Spans) -> float:
    """How much of the spans lies in the union of others."""
    union: list[tuple[float, float]] = []
    for start, end in sorted(by):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((start, end))
    total, first = 0.0, 0
    for start, end in sorted(spans):
        while first < len(union) and union[first][1] <= start:
            first += 1
        for other_start, other_end in union[first:]:
            if other_start >= end:
                break
            total += min(end, other_end) - max(start, other_start)
    return total


def _lane(lane: Lane) -> tuple[str, ...]:
    busy = [_milliseconds(sum(end - start for start, end in each)) for each in lane[1:]]
    return lane.name, str(len(lane.copies)), str(len(lane.kernels)), *busy


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


if __name__ == "__main__":
    sys.exit(main())
