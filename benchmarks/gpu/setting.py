"""What the GPU scripts share: their arguments, their devices, how they take time, their report."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar, get_args

import torch

from benchmarks.machine import describe
from benchmarks.report import RESULTS, Figure, Grid, Report
from fxpipe.errors import ExecutionError
from fxpipe.runtime.choice import Dispatch

T = TypeVar("T")

WARM_UP = 3
LEAST = 3
"""Rounds that are run even where the time is up."""

HOW: dict[Dispatch, str] = {"device": "a thread a device", "thread": "one thread"}
"""Who launches, in words."""


@dataclass(frozen=True)
class Setting:
    """Where a script runs, and for how long.

    Attributes:
        dry_run: whether this is a trial on CPU devices, whose figures mean nothing.
        device: what everything runs on.
        output: the folder of the result file.
        ends: when no more rows are begun, as ``perf_counter`` tells the time.
        rounds: steps that are timed.
    """

    dry_run: bool
    device: torch.device
    output: Path
    ends: float
    rounds: int

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return perf_counter() > self.ends

    def devices(self, count: int) -> list[torch.device]:
        """The same device so many times: as many virtual ones."""
        return [self.device] * count

    @property
    def dispatches(self) -> tuple[Dispatch, ...]:
        """Who can launch: on CPU devices the thread of each."""
        return ("device",) if self.dry_run else get_args(Dispatch)

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if not self.dry_run:
            torch.cuda.synchronize(self.device)

    def seconds(self, steps: Mapping[str, Callable[[], Any]], limit: float) -> dict[str, float]:
        """The median of each, a step of each in turn, the device idle before and after.

        Args:
            steps: name → what to time.
            limit: seconds after which no more rounds are begun.
        """
        warm_up = 1 if self.dry_run else WARM_UP
        found: dict[str, list[float]] = {name: [] for name in steps}
        start = perf_counter()
        for index in range(warm_up + self.rounds):
            if index >= warm_up + LEAST and perf_counter() - start > limit:
                break
            for name, step in steps.items():
                self.synchronize()
                before = perf_counter()
                step()
                self.synchronize()
                found[name].append(perf_counter() - before)
        return {name: median(each[warm_up:]) for name, each in found.items()}

    def held(self) -> int:
        """Bytes of the tensors that are there now; 0 in a dry run."""
        return 0 if self.dry_run else torch.cuda.memory_allocated(self.device)

    def peak(self, step: Callable[[], Any]) -> int:
        """The most bytes of tensors at once while something runs; 0 in a dry run."""
        self.synchronize()
        if not self.dry_run:
            torch.cuda.reset_peak_memory_stats(self.device)
        step()
        self.synchronize()
        return 0 if self.dry_run else torch.cuda.max_memory_allocated(self.device)

    def row(self, measure: Callable[[], T]) -> T | None:
        """What is measured, or None where the time is up or the device has too little memory."""
        if self.over:
            return None
        try:
            return measure()
        except (RuntimeError, ExecutionError) as error:
            if not out_of_memory(error):
                raise
            return None
        finally:
            self.tidy()

    def tidy(self) -> None:
        """Give back what earlier rows have left."""
        gc.collect()
        if not self.dry_run:
            torch.cuda.empty_cache()

    def publish(
        self,
        name: str,
        title: str,
        settings: Mapping[str, str | int],
        figures: Sequence[Figure],
        grids: Sequence[Grid] = (),
    ) -> None:
        """Write the result file, with all that the figures depend on."""
        common = {
            "versions": ", ".join(
                f"{package} {_version(package)}"
                for package in ("fxpipe", "torchgpipe", "cuda-bindings")
            ),
            "matrix products": f"float32, precision {torch.get_float32_matmul_precision()!r}",
            "times": f"medians of at most {self.rounds} steps, of each in turn, after {WARM_UP}",
        }
        if self.dry_run:
            name, title = f"{name}-dry-run", f"{title} (dry run: the figures mean nothing)"
        machine = replace(describe(), gpu=_gpu(self.device))
        told = {**settings, **common}
        Report(f"gpu-{name}", title, told, figures, machine, grids).publish(self.output)


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the arguments that all scripts have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny models on CPU devices; figures mean nothing"
    )
    parser.add_argument("--output", type=Path, help="folder of the result file")
    parser.add_argument("--minutes", type=float, default=6.5, help="then begin no more rows")
    parser.add_argument("--rounds", type=int, default=20, help="the most steps of a median")
    return parser


def read(
    parser: argparse.ArgumentParser, given: Sequence[str] | None
) -> tuple[Setting, argparse.Namespace]:
    """The setting, and the script's own arguments. Exits where there is no CUDA device."""
    started = perf_counter()
    found = parser.parse_args(given)
    # before CUDA starts: by default streams share eight queues, in which one waits for another
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if found.dry_run:
        device = torch.device("cpu")
        output = found.output or Path(tempfile.gettempdir()) / "fxpipe-dry-run"
        rounds = 1
    elif torch.cuda.is_available():
        device, output, rounds = torch.device("cuda:0"), found.output or RESULTS, found.rounds
        torch.set_float32_matmul_precision("high")
    else:
        parser.exit(
            2, "there is no CUDA device here; --dry-run tries the script on CPU devices instead\n"
        )
    torch.manual_seed(0)
    ends = started + 60 * found.minutes
    return Setting(found.dry_run, device, output, ends, rounds), found


def add_dispatch(parser: argparse.ArgumentParser) -> None:
    """Let a script choose who launches."""
    parser.add_argument(
        "--dispatch", choices=get_args(Dispatch), default="device", help="who launches"
    )


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it comes from, is that the device has no memory left."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(none)"


def _gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return "none"
    about = torch.cuda.get_device_properties(device)
    return (
        f"{about.name}, {about.total_memory / 2**30:.0f} GiB, {about.multi_processor_count} "
        f"multiprocessors, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    )
