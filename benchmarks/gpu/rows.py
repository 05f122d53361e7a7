"""A report that is written after every row, so that an error or time limit costs only one row."""

from __future__ import annotations

import importlib.metadata
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from benchmarks.gpu.setting import WARM_UP, Setting
from benchmarks.machine import describe
from benchmarks.report import Figure, Grid, Report

T = TypeVar("T")

LONGEST = 200
"""Characters of an error in a result; all of it is printed."""


class Rows:
    """What a script has found so far.

    Attributes:
        figures: as in Report.
        grids: as in Report; that of the rows that are missing is added.
        missing: row → why it is.
    """

    def __init__(
        self, setting: Setting, name: str, title: str, settings: Mapping[str, str | int]
    ) -> None:
        """Nothing is measured yet.

        Args:
            setting: where the script runs.
            name: of the result files, behind ``gpu-``.
            title: a line for people.
            settings: what runs, in words and numbers.
        """
        self.figures: list[Figure] = []
        self.grids: list[Grid] = []
        self.missing: dict[str, str] = {}
        self._setting = setting
        if setting.dry_run:
            name, title = f"{name}-dry-run", f"{title} (dry run: the figures mean nothing)"
        self._name, self._title = f"gpu-{name}", title
        packages = ("fxpipe", "torchgpipe", "cuda-bindings")
        self._settings = {
            **settings,
            "versions": ", ".join(f"{package} {_version(package)}" for package in packages),
            "matrix products": f"float32, precision {torch.get_float32_matmul_precision()!r}",
            "times": f"medians of at most {setting.rounds} steps, of each in turn, after {WARM_UP}",
        }
        self._machine = replace(describe(), gpu=_gpu(setting.device))

    def measure(self, row: str, measure: Callable[[], T]) -> T | None:
        """What is measured, or None where the time is up or there was an error, of any kind.

        Args:
            row: its name, for the table of those that are missing.
            measure: measures it.
        """
        if self._setting.over:
            self.missing[row] = "no time was left"
            return None
        print(f"{row} …", file=sys.stderr, flush=True)
        try:
            return measure()
        except Exception as error:
            self.lose(row, error)
            return None
        finally:
            self._tidy()

    def lose(self, row: str, error: Exception) -> None:
        """Note why a row is missing. Call it where the error is handled."""
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".replace("|", "/").split()
        self.missing[row] = " ".join(text)[:LONGEST]

    def publish(self) -> None:
        """Write what there is."""
        self._report().write(self._setting.output)

    def end(self) -> int:
        """Write and print the report; returns 1 if a row is missing."""
        self._report().publish(self._setting.output)
        return 1 if self.missing else 0

    def _report(self) -> Report:
        grids = list(self.grids)
        if self.missing:
            grids.append(Grid(("missing", "why"), [*self.missing.items()]))
        name, title = self._name, self._title
        return Report(name, title, self._settings, self.figures, self._machine, grids)

    def _tidy(self) -> None:
        try:
            self._setting.tidy()
        except Exception:  # a device that has failed reports it whatever it is asked
            traceback.print_exc()


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
