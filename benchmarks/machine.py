"""A description of the machine that a benchmark ran on, on which all figures depend."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Machine:
    """What the figures of a run depend on.

    Attributes:
        date: of the run, as in 2026-01-31.
        cpu: the processor's model.
        cores: logical processors that this process may use.
        load: average number of running processes over the minute before, this one among them.
        system: operating system and its release.
        python: version.
        torch: version and build.
        gpu: the device that a benchmark on one ran on, its memory and the versions of its software.
    """

    date: str
    cpu: str
    cores: int
    load: float
    system: str
    python: str
    torch: str
    gpu: str = "none"


def describe() -> Machine:
    """This machine, now."""
    return Machine(
        date=datetime.date.today().isoformat(),
        cpu=_cpu(),
        cores=_cores(),
        load=round(os.getloadavg()[0], 2),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
