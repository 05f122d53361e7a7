"""Ranked choices of how to train on a cluster, with their table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Any

from rich.console import JustifyMethod

from fxpipe.errors import InputError
from fxpipe.extensions.planner.candidates import Modes, Predicted
from fxpipe.extensions.planner.cluster import Cluster, Layout
from fxpipe.extensions.planner.profile import Cut
from fxpipe.formatting import bytes_text, plain_table, preformatted, table_text, time_text

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
    """A way to train, and the time and memory that it is predicted to need.

    Attributes:
        layout: where stages and replicas are.
        cut: the model cut into stages.
        predicted: schedule, micro-batches, recomputation and offloading; time and memory.
        samples: how many samples a micro-batch has.
        batch: how many samples a step has, over all replicas.
        limit: the largest part of the step besides computing, a key of ``HELP``; "memory" if the
            choice does not fit.
    """

    layout: Layout
    cut: Cut = field(repr=False)
    predicted: Predicted
    samples: int
    batch: int
    limit: str
    make: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    @property
    def cuts(self) -> tuple[str, ...]:
        """Stage → the layer at which it begins."""
        return self.cut.cuts

    @property
    def stages(self) -> int:
        return self.layout.stages

    @property
    def replicas(self) -> int:
        return self.layout.replicas

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.batch / self.predicted.seconds

    @property
    def memory(self) -> float:
        """The bytes that the fullest device holds."""
        return max(self.predicted.peaks)

    @property
    def lacks(self) -> float:
        """The bytes that are missing on the devices of a replica, summed; infinite if the choice
        cannot run."""
        limits = (self.layout.cluster.memory,) * self.stages
        return sum(self.predicted.over(limits, exactly=True))

    @property
    def fits(self) -> bool:
        return not self.lacks

    @property
    def help(self) -> str:
        """What would make the step faster, or let it fit."""
        return HELP[self.limit]

    def compile(self, devices: Any = None, **options: Any) -> Any:
        """Compile the pipe of this choice, with the options that ``plan_training`` was given.

        Args:
            devices: as for ``compile``; by default a CPU device for each stage. Several replicas
                need a DeviceMesh with the dimensions "dp" and "pp".
            **options: more options of ``fxpipe.compile``.

        Raises:
            InputError: the choice has no model, or several replicas and no ``devices``.
        """
        if self.make is None:
            raise InputError("this choice has no model to compile; make it with plan_training")
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
            offload=chosen.offload,
            **options,
        )


@dataclass(frozen=True)
class TrainingPlan:
    """Choices, the best first.

    Attributes:
        choices: those that fit, the fastest first; if none fits, those with the least missing
            memory first.
        cluster: the devices.
    """

    choices: tuple[Choice, ...]
    cluster: Cluster

    @property
    def best(self) -> Choice:
        return self.choices[0]

    def __str__(self) -> str:
        rows = [
            (
                f"{choice.replicas} × {choice.stages}",
                str(choice.layout),
                choice.predicted.candidate.recipe.name,
                f"{choice.predicted.candidate.microbatches} of {choice.samples}",
                _stages_text(choice.predicted.candidate.recompute),
                _stages_text(choice.predicted.candidate.offload),
                time_text(choice.predicted.seconds),
                f"{choice.throughput:.4g}",
                f"{choice.predicted.idle:.0%}",
                bytes_text(round(choice.memory)) + (" (too much)" if not choice.fits else ""),
                choice.limit,
            )
            for choice in self.choices
        ]
        table = plain_table(gap=1)
        headings = [
            ("replicas\n× stages", "left"),
            ("in", ""),
            ("schedule", "left"),
            ("micro-\nbatches", "left"),
            ("recompute", ""),
            ("offload", ""),
            ("a step", "right"),
            ("samples\na second", "right"),
            ("idle", "right"),
            ("memory", "right"),
            ("limited by", ""),
        ]
        shown = [at for at in range(len(headings)) if any(row[at] for row in rows)]
        for at in shown:
            heading, side = headings[at]
            justify: JustifyMethod = "right" if side == "right" else "left"
            table.add_column(heading, justify=justify, no_wrap=bool(side))
        for row in rows:
            table.add_row(*(row[at] for at in shown))
        lines = [
            table_text(table),
            f"the best is limited by {self.best.limit}; what would help: {self.best.help}",
        ]
        if not self.best.fits:
            lacks = self.best.memory - self.cluster.memory
            lines.append(f"nothing fits: {bytes_text(round(lacks))} are missing on a device")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def _stages_text(modes: Modes) -> str:
    """The stages that recompute, or offload: "all" or their numbers; empty if none does."""
    some = [str(stage) for stage, mode in enumerate(modes) if mode != "never"]
    return "all" if some and len(some) == len(modes) else ", ".join(some)


def ranked(choices: Sequence[Choice], cluster: Cluster, keep: int) -> TrainingPlan:
    """The ``keep`` fastest choices that fit. If none fits, those that can run with the least
    missing memory. Only as many as needed have their memory counted exactly."""
    choices = sorted(choices, key=lambda choice: choice.predicted.seconds)
    if fitting := tuple(islice((choice for choice in choices if choice.fits), keep)):
        return TrainingPlan(fitting, cluster)
    run = [replace(choice, limit="memory") for choice in choices if choice.lacks < inf]
    return TrainingPlan(tuple(sorted(run, key=lambda choice: choice.lacks)[:keep]), cluster)
