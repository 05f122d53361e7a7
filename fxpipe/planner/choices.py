"""Ranked choices: replicas × stages, micro-batches, schedule, what is recomputed or offloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Any

from rich import box
from rich.table import Table

from fxpipe.draw.canvas import BoxStyle, Canvas
from fxpipe.draw.chart import Chart, LegendEntry
from fxpipe.draw.picture import FORWARD, OTHER, UPDATE, Picture
from fxpipe.errors import InputError
from fxpipe.formatting import bytes_text, preformatted, table_text, time_text
from fxpipe.planner.candidates import (
    Modes,
    Predicted,
)
from fxpipe.planner.cluster import Cluster, Layout
from fxpipe.planner.profile import Stages

_WIDTH, _BARS = 150, 480.0

HELP = {
    "the slowest stage": "stages of more even times: fewer stages, or a finer cut",
    "idle devices": "more micro-batches, fewer stages, or a schedule with a smaller bubble",
    "transfers": "faster links, larger micro-batches, or neighbours that are nearer",
    "sums over replicas": "a larger batch, fewer replicas, or faster links between them",
    "recomputation": "more memory, or more stages",
    "offloading": "more memory, or a faster way to what is outside of it",
    "computing": "more or faster devices",
    "memory": "devices with more memory, or more of them",
}
"""What limits a step → what would help."""


@dataclass(frozen=True)
class Choice:
    """A way to train, and what it is predicted to need.

    Attributes:
        layout: where stages and replicas are.
        cut: the model in stages.
        predicted: schedule, micro-batches, recomputation and offloading; its time, and the memory
            of devices.
        samples: how many samples a micro-batch has.
        batch: how many a step has, over all replicas.
        limit: what takes the largest part of the step, besides what must be computed; "memory"
            where it does not fit.
    """

    layout: Layout
    cut: Stages = field(repr=False)
    predicted: Predicted
    samples: int
    batch: int
    limit: str
    make: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    @property
    def cuts(self) -> tuple[str, ...]:
        """Stage → the layer with which it begins."""
        return self.cut.cuts

    @property
    def stages(self) -> int:
        return self.layout.stages

    @property
    def replicas(self) -> int:
        return self.layout.replicas

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return self.batch / self.predicted.seconds

    @property
    def memory(self) -> float:
        """Bytes of the fullest device."""
        return max(self.predicted.peaks)

    @property
    def lacks(self) -> float:
        """The bytes that all devices of a replica together have too little; infinite where the
        choice cannot run."""
        limits = (self.layout.cluster.memory,) * self.stages
        return sum(self.predicted.over(limits, exactly=True))

    @property
    def fits(self) -> bool:
        return not self.lacks

    @property
    def help(self) -> str:
        """What would make the step shorter, or let it fit."""
        return HELP[self.limit]

    def compile(self, devices: Any = None, **options: Any) -> Any:
        """Make the pipe with the arguments of ``plan_training`` and more ones of ``compile``.

        Args:
            devices: as for ``compile``; by default as many CPU devices as there are stages. With
                several replicas a DeviceMesh with the dimensions "dp" and "pp".
            **options: of ``fxpipe.compile``.

        Raises:
            InputError: the devices are others than those of the choice.
        """
        if self.make is None:
            raise InputError(
                "this choice is of numbers alone; plan_training has a model to compile"
            )
        if devices is None and self.replicas > 1:
            raise InputError(
                f"{self.replicas} replicas run in processes of their own; give each of them "
                f"devices=init_device_mesh(..., ({self.replicas}, {self.stages}), "
                'mesh_dim_names=("dp", "pp"))'
            )
        chosen = self.predicted.candidate
        return self.make(
            devices or ["cpu"] * self.stages,
            schedule=chosen.recipe.name,
            microbatches=chosen.microbatches,
            recompute=list(chosen.recompute),
            offload=list(chosen.offload) or "never",
            **options,
        )


@dataclass(frozen=True)
class TrainingPlan:
    """Choices, the fastest that fits first.

    Attributes:
        choices: those that fit into memory, by throughput; or, if none does, those that lack least.
        cluster: the devices.
    """

    choices: tuple[Choice, ...]
    cluster: Cluster

    @property
    def best(self) -> Choice:
        return self.choices[0]

    def __str__(self) -> str:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False)
        for heading in ("replicas × stages", "in", "schedule", "micro-batches"):
            table.add_column(heading)
        for heading in ("recompute", "offload"):
            table.add_column(heading)
        for heading in ("a step", "samples/s", "idle", "memory"):
            table.add_column(heading, justify="right")
        table.add_column("limited by")
        for each in self.choices:
            found, chosen = each.predicted, each.predicted.candidate
            table.add_row(
                f"{each.replicas} × {each.stages}",
                str(each.layout),
                chosen.recipe.name,
                f"{chosen.microbatches} of {each.samples}",
                _some(chosen.recompute),
                _some(chosen.offload),
                time_text(found.seconds),
                f"{each.throughput:.4g}",
                f"{found.idle:.0%}",
                bytes_text(round(each.memory)) + (" (too much)" if not each.fits else ""),
                each.limit,
            )
        lines = [
            table_text(table, _WIDTH),
            f"the best is limited by {self.best.limit}; what would help: {self.best.help}",
        ]
        if not self.best.fits:
            lacks = self.best.memory - self.cluster.memory
            lines.append(f"nothing fits: {bytes_text(round(lacks))} are missing on a device")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def draw(self) -> Picture:
        """Throughput against memory: a mark for each choice, as far to the right as its memory."""
        most = max(each.memory for each in self.choices)
        rows = sorted(self.choices, key=lambda each: -each.throughput)
        unit = 1.0 / (1 << 20)
        canvas = Canvas("plan")
        names = [f"{each.throughput:.4g}/s" for each in rows]
        wrong = {at for at, each in enumerate(rows) if not each.fits}
        title = f"samples a second against memory · {self.cluster.devices} devices"
        chart = Chart(canvas, title, names, most * unit, _BARS / (most * unit), wrong=wrong)
        for at, each in enumerate(rows):
            look = BoxStyle(UPDATE if each is self.best else FORWARD if each.fits else OTHER)
            told = f"{each.replicas} × {each.stages} · {each.predicted}"
            corner, wide = (chart.x(0), chart.y(at)), each.memory / most * _BARS
            canvas.box(corner, wide, chart.row_height, look, tooltip=told)
            canvas.text((corner[0] + 4, corner[1]), _BARS, chart.row_height, told, size=8)
        below = chart.axis("MiB of the fullest device")
        entries = [
            LegendEntry("fits", BoxStyle(FORWARD)),
            LegendEntry("the best", BoxStyle(UPDATE)),
        ]
        chart.legend(below, [*entries, LegendEntry("too much memory", BoxStyle(OTHER))])
        return canvas.picture


def _some(modes: Modes) -> str:
    """Which stages recompute, or offload."""
    some = [str(stage) for stage, mode in enumerate(modes) if mode != "never"]
    return "none" if not some else "all" if len(some) == len(modes) else ", ".join(some)


def ranked(found: Sequence[Choice], cluster: Cluster, keep: int) -> TrainingPlan:
    """The fastest of these that fit, or those that lack least, of those that can run. What is not
    among the fastest is not counted exactly."""
    found = sorted(found, key=lambda each: each.predicted.seconds)
    if chosen := tuple(islice((each for each in found if each.fits), keep)):
        return TrainingPlan(chosen, cluster)
    run = [replace(each, limit="memory") for each in found if each.lacks < inf]
    return TrainingPlan(tuple(sorted(run, key=lambda each: each.lacks)[:keep]), cluster)
