"""Compare predicted with counted memory of each device, for schedules and recomputation modes.

A second part halves the devices' memory and shows what is recomputed or offloaded then.
CPU devices count live storages while steps run, as if each had its own memory.
Run it with ``python -m benchmarks.memory``; ``benchmarks.gpu.memory`` asks torch's allocator.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from benchmarks.counted import counted
from benchmarks.machine import describe
from benchmarks.models.gpt2 import GPT2, next_words
from benchmarks.models.unet import UNet
from benchmarks.report import RESULTS, Figure, Grid, Report
from examples.plain import one_thread
from fxpipe.extensions.tables import time_text
from fxpipe.formatting import bytes_text

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "2bw")
MODES = ("never", "except_last", "always")
LASTING = ("parameters", "optimizer", "gradients")
"""The parts of a peak that neither recomputing nor offloading lessens."""

STEPS = 3
"""The number of counted steps, after as many uncounted ones, so that batches overlap."""

Adam = partial(torch.optim.Adam, lr=1e-4)
Loss = Callable[[Tensor, Tensor], Tensor]


class Work(NamedTuple):
    """A model to train.

    Attributes:
        name: with its size.
        model: makes it.
        inputs: a batch.
        target: what the loss compares its output with.
        loss: ``loss(output, target)``.
    """

    name: str
    model: Callable[[], nn.Module]
    inputs: Tensor
    target: Tensor
    loss: Loss


class Row(NamedTuple):
    """A device of one run, in bytes.

    Attributes:
        predicted: its peak.
        counted: the most that it held.
        parts: what the predicted peak is made of.
    """

    predicted: int
    counted: int
    parts: dict[str, int]

    @property
    def error(self) -> float:
        """The prediction above the count, in per cent of the count."""
        return 100 * (self.predicted / self.counted - 1)


def works(tiny: bool) -> list[Work]:
    """The models, as small as possible for a trial."""
    torch.manual_seed(0)
    side, length = (16, 8) if tiny else (64, 128)
    images, maps = torch.randn(16, 3, side, side), torch.randn(16, 1, side, side)
    tokens = torch.randint(1000, (16, length + 1))
    channels, width, layers = (4, 16, 2) if tiny else (16, 128, 6)
    return [
        Work(f"U-Net (2, {channels})", lambda: UNet(2, channels, depth=3), images, maps, mse_loss),
        Work(
            f"GPT-2 ({layers} blocks of {width})",
            lambda: GPT2(1000, length, layers, width, 4),
            tokens[:, :-1].contiguous(),
            tokens[:, 1:].contiguous(),
            next_words,
        ),
    ]


def measure(
    work: Work, devices: int, seconds: list[str] | None = None, **options: Any
) -> list[Row]:
    """Device → predicted and counted.

    Args:
        work: what is trained.
        devices: on how many.
        seconds: gets what a step does, and how long it takes as predicted, and as measured.
        **options: of ``compile``.
    """
    torch.manual_seed(0)
    with fxpipe.compile(
        work.model(), ["cpu"] * devices, loss=work.loss, optimizer=Adam, **options
    ) as pipe:
        pipe.prepare(work.inputs, target=work.target)
        with counted(pipe) as found:
            for step in range(2 * STEPS):
                if step == STEPS:
                    for device in found:
                        device.clear()
                pipe.step(work.inputs, target=work.target)
            pipe.flush()
        if seconds is not None:
            times = []
            for _ in range(2 + STEPS):
                start = perf_counter()
                pipe.step(work.inputs, target=work.target)
                times.append(perf_counter() - start)
            tasks = {(t.kind, str(t.stage)) for row in pipe.schedule.rows for t in row}
            does = [f"{pipe.schedule.name}, {pipe.schedule.microbatches} micro-batches"]
            for letter, word in (("R", "recompute"), ("O", "offload")):
                if stages := sorted(stage for kind, stage in tasks if kind == letter):
                    does.append(f"{word} {', '.join(stages)}")
            predicted = time_text(pipe.simulate().step_time)
            seconds += ["; ".join(does), predicted, time_text(median(times[2:]))]
        return [
            Row(memory.peak, device.peak, dict(memory.parts))
            for memory, device in zip(pipe.simulate().memory, found, strict=True)
        ]


def halved(work: Work, schedule: str, microbatches: int) -> Grid:
    """A model on two devices with all kept, recomputed, offloaded or both, and what is chosen where
    each may hold half of what the first takes: with as many micro-batches, and with any number."""
    cells: list[tuple[str, ...]] = []
    limits: list[int] = []
    ways: dict[str, dict[str, Any]] = {
        "all kept": {"schedule": schedule},
        "all recomputed": {"schedule": schedule, "recompute": "always"},
        "all offloaded": {"schedule": schedule, "extensions": ["offload"]},
        "both": {"schedule": schedule, "recompute": "always", "extensions": ["offload"]},
        "half of the memory": {"schedule": "auto", "memory_limits": limits},
        "half, any micro-batches": {
            "schedule": "auto",
            "memory_limits": limits,
            "microbatches": None,
        },
    }
    for way, options in ways.items():
        told: list[str] = []
        try:
            rows = measure(work, 2, told, **{"microbatches": microbatches, **options})
        except fxpipe.PartitionError as error:
            cells.append(
                (
                    f"{work.name}, {schedule}: {way}",
                    f"refused: {str(error).partition('; or give')[0]}",
                    *4 * ("",),
                )
            )
            continue
        limits[:] = limits or [row.predicted // 2 for row in rows]
        figures = [
            f"{bytes_text(row.predicted)} ({row.error:+.2f} % of {bytes_text(row.counted)}); "
            f"{bytes_text(sum(row.parts[part] for part in LASTING))} for weights"
            for row in rows
        ]
        cells.append((f"{work.name}, {schedule}: {way}", *told, *figures))
    heads = ("way", "does", "predicted step", "measured step", "device 0", "device 1")
    return Grid(heads, cells)


def errors(devices: int, found: list[tuple[str, str, Row]]) -> list[Figure]:
    """How far predictions for so many devices are off."""
    what, device, _ = max(found, key=lambda each: abs(each[2].error))
    off = [abs(row.error) for *_, row in found]
    within = sum(error <= 3 for error in off)
    return [
        Figure(f"{devices} devices: the largest error", max(off), "%"),
        Figure("of", f"{what}, device {device}"),
        Figure(f"{devices} devices: the mean error, signs left out", sum(off) / len(off), "%"),
        Figure(f"{devices} devices: at most 3 %", f"{within} of {len(off)}"),
    ]


def stored_in() -> str:
    """The folder in which offloads store, and the file system that it is on."""
    folder = Path(tempfile.gettempdir()).resolve()
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    on = max((m for m in mounts if folder.is_relative_to(m[1])), key=lambda m: len(m[1]))
    return f"{folder}, {on[2]} on {on[0]}"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--devices", type=int, nargs="+", default=(2, 3), help="each in turn")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="small models, for a trial")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result file")
    own = parser.parse_args(given)
    machine = describe()
    found: list[tuple[str, str, Row]] = []
    figures = []
    with one_thread():
        for devices in own.devices:
            begun = len(found)
            for work in works(own.tiny):
                for schedule in own.schedules:
                    for mode in own.modes:
                        what = f"{work.name}, {schedule}, recompute {mode}"
                        options = {"schedule": schedule, "recompute": mode}
                        rows = measure(work, devices, microbatches=own.microbatches, **options)
                        found += [
                            (what, f"{device} of {devices}", row) for device, row in enumerate(rows)
                        ]
            figures += errors(devices, found[begun:])
        limited = [halved(works(own.tiny)[0], name, own.microbatches) for name in ("gpipe", "1f1b")]
    parts = [part for part in found[0][2].parts if any(row.parts[part] for _, _, row in found)]
    heads = ("model, schedule", "device", "predicted", "counted", "error", *parts)
    cells = [
        (
            what,
            device,
            bytes_text(row.predicted),
            bytes_text(row.counted),
            f"{row.error:+.2f} %",
            *(bytes_text(row.parts[part]) for part in parts),
        )
        for what, device, row in found
    ]
    settings: dict[str, str | int] = {
        "devices": f"{' and '.join(map(str, own.devices))} CPU devices of one thread",
        "batch": 16,
        "micro-batches": own.microbatches,
        "optimizer": "Adam",
        "counted": f"the most bytes of storages alive at once in {STEPS} steps, after as many",
        "predicted": "the peak of pipe.simulate(), and what it is made of",
        "stored in": stored_in(),
    }
    title = "Memory of every device, predicted and counted"
    grids = [Grid(heads, cells), *limited]
    Report("memory", title, settings, figures, machine, grids).publish(own.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
