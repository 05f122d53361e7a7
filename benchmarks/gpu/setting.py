"""What the GPU scripts share: arguments, devices and timing."""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, get_args

import torch

from benchmarks.report import RESULTS
from fxpipe.runtime.choice import Dispatches

WARM_UP = 3
LEAST = 3
"""Rounds that are run even where the time is up."""

HOW: dict[Dispatches, str] = {"device": "a thread a device", "thread": "one thread"}
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
    def dispatches(self) -> tuple[Dispatches, ...]:
        """Who can launch: on CPU devices the thread of each."""
        return ("device",) if self.dry_run else get_args(Dispatches)

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if not self.dry_run:
            torch.cuda.synchronize(self.device)

    def seconds(self, steps: Mapping[str, Callable[[], Any]], limit: float) -> dict[str, float]:
        """The median of each, a step of each in turn, the device idle before and after.

        Args:
            steps: name → what to time.
            limit: seconds after which no more rounds are begun; nor are they where the script's
                time is up.
        """
        warm_up = 1 if self.dry_run else WARM_UP
        found: dict[str, list[float]] = {name: [] for name in steps}
        start = perf_counter()
        for index in range(warm_up + self.rounds):
            if index >= warm_up + LEAST and (perf_counter() - start > limit or self.over):
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

    def tidy(self) -> None:
        """Give back what earlier rows have left, what libraries keep to work in among it."""
        gc.collect()
        if not self.dry_run:
            if clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None):
                clear()
            torch.cuda.empty_cache()


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the arguments that all scripts have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run tiny models on CPU devices; figures mean nothing",
    )
    parser.add_argument("--output", type=Path, help="folder of the result file")
    parser.add_argument(
        "--minutes", type=float, default=6.5, help="begin no more rows after this time"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="the most steps to take the median of"
    )
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
        "--dispatch", choices=get_args(Dispatches), default="device", help="who launches kernels"
    )
