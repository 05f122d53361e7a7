"""Time the planning of each benchmark model for 16 simulated devices.

The devices are four hosts of four devices each. The model is traced, measured on this machine's
CPU, divided and simulated. Run it with ``python -m benchmarks.planning`` on an idle machine.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import torch

import fxpipe
from benchmarks.machine import describe
from benchmarks.models.own import CASES as OWN
from benchmarks.peers.case import CASES as LARGE
from benchmarks.report import Figure, Report, timed
from fxpipe.extensions.planner.cluster import Level
from fxpipe.extensions.simulator import Link

CLUSTER = fxpipe.Cluster(
    (Level("host", 4, Link(5e-6, 100e9)), Level("rack", 4, Link(20e-6, 10e9))), memory=16 * 2**30
)
BATCH, MOST = 64, 30.0
"""Samples per step, and the most seconds that planning may take."""


def main() -> int:
    """Run the benchmark; returns 1 if a plan took longer than it may."""
    parser = argparse.ArgumentParser(description="time plans for 16 simulated devices")
    parser.add_argument("models", nargs="*", help="names of models; by default all")
    wanted = parser.parse_args().models
    figures: list[Figure] = []
    slowest = 0.0
    for name, plan in plans().items():
        if wanted and name not in wanted:
            continue
        found, seconds = timed(plan)
        print(f"{name}\n{found}")
        best, slowest = found.best, max(slowest, seconds)
        figures += [
            Figure(f"{name}: planned in", seconds, "s"),
            Figure(
                f"{name}: the best",
                f"{best.replicas} × {best.stages}, {best.predicted.candidate}",
            ),
        ]
    settings = {"devices": 16, "batch": BATCH, "threads": torch.get_num_threads()}
    Report("planning", "Plans on 16 devices", settings, figures, describe()).publish()
    return 0 if slowest <= MOST else 1


def plans() -> dict[str, Any]:
    """Name of a model → what makes its plan."""
    found: dict[str, Any] = {}
    adam = partial(torch.optim.Adam, lr=1e-3)
    for case in OWN:
        torch.manual_seed(0)
        batch = case.batch(8)
        example = (batch.args, {**batch.kwargs, "target": batch.target})
        found[case.name] = partial(_plan, case.model(), example, loss=case.loss, optimizer=adam)
    for name in ("unet", "transformer"):
        model, x, y = LARGE[name].make()
        options: Any = {"loss": LARGE[name].loss, "optimizer": LARGE[name].optimizer}
        found[name] = partial(_plan, model, ((x[:8],), {"target": y[:8]}), **options)
    return found


def _plan(model: Any, example: Any, **options: Any) -> fxpipe.TrainingPlan:
    return fxpipe.plan_training(model, CLUSTER, BATCH, example=example, **options)


if __name__ == "__main__":
    sys.exit(main())
