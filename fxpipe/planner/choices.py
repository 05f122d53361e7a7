"""Ranked choices: replicas × stages, micro-batches, schedule, what is recomputed or offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any

from rich import box
from rich.table import Table

from fxpipe.draw.canvas import Canvas, Look
from fxpipe.draw.chart import Chart, Entry
from fxpipe.draw.picture import FORWARD, OTHER, UPDATE, Picture
from fxpipe.errors import FxpipeError, InputError
from fxpipe.ir.recipe import Recipe
from fxpipe.passes.schedule import add_offload, add_recompute, modes_of
from fxpipe.planner.candidates import (
    Candidate,
    Modes,
    Predicted,
    best_of,
    evaluate,
    least_seconds,
    library_over,
    microbatch_counts,
)
from fxpipe.planner.cluster import Cluster, Layout
from fxpipe.planner.profile import Profile, Stages
from fxpipe.simulator.simulate import simulate_schedule
from fxpipe.simulator.simulation import Simulation
from fxpipe.words import bytes_text, preformatted, table_text, time_text

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
    def fits(self) -> bool:
        return self.memory <= self.layout.cluster.memory

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
            look = Look(UPDATE if each is self.best else FORWARD if each.fits else OTHER)
            told = f"{each.replicas} × {each.stages} · {each.predicted}"
            corner, wide = (chart.x(0), chart.y(at)), each.memory / most * _BARS
            canvas.box(corner, wide, chart.row_height, look, tooltip=told)
            canvas.text((corner[0] + 4, corner[1]), _BARS, chart.row_height, told, size=8)
        below = chart.axis("MiB of the fullest device")
        entries = [Entry("fits", Look(FORWARD)), Entry("the best", Look(UPDATE))]
        chart.legend(below, [*entries, Entry("too much memory", Look(OTHER))])
        return canvas.picture


def _some(modes: Modes) -> str:
    """Which stages recompute, or offload."""
    some = [str(stage) for stage, mode in enumerate(modes) if mode != "never"]
    return "none" if not some else "all" if len(some) == len(modes) else ", ".join(some)


Peaks = Callable[[Stages, int, Candidate], tuple[float, ...]]
"""A cut, replicas and a candidate → for each device the most bytes that it holds."""


def choices(
    profile: Profile,
    cluster: Cluster,
    batch: int,
    *,
    stale: bool = False,
    halves: bool = True,
    recipes: Sequence[Recipe] | None = None,
    recompute: bool = True,
    offload: bool = True,
    keep: int = 10,
    peaks: Peaks | None = None,
) -> TrainingPlan:
    """Rank the ways to train a measured model; the arguments are those of ``plan_training``.

    Args:
        halves: whether stages can run backwards in halves.
        peaks: predicts what devices hold; by default as counted for atoms.
    """
    found: list[Choice] = []
    stages: dict[int, Stages | None] = {}
    layouts = [each for each in cluster.layouts() if batch % each.replicas == 0]
    for layout in sorted(layouts, key=lambda each: each.stages):
        if layout.stages not in stages:
            stages[layout.stages] = profile.cut(layout.stages, cluster.speed)
        cut = stages[layout.stages]
        if cut is None:
            continue
        limits = (cluster.memory,) * layout.stages
        predictor = _Predictor(cut, layout, batch // layout.replicas, peaks)
        named = recipes
        if named is None:
            named = library_over(layout.stages, stale=stale, halves=halves)
        fast = sorted(each.predicted.seconds for each in found if each.fits)
        ways = [
            (recipe, count)
            for recipe in named
            for count in microbatch_counts(predictor.batch, layout.stages)
        ]
        modes: Modes | None = None if recompute else modes_of("never", layout.stages)
        stores = recompute and offload and profile.away is not None
        made = evaluate(
            ways,
            modes,
            limits,
            predictor.least,
            predictor.predict,
            keep=2,
            offload=None if stores else (),
            worth=fast[keep - 1] if len(fast) >= keep else inf,
        )
        for chosen in _best_of_each(made):
            samples = ceil(predictor.batch / chosen.candidate.microbatches)
            fits = max(chosen.peaks) <= cluster.memory
            limit = predictor.limit(chosen) if fits else "memory"
            found.append(Choice(layout, cut, chosen, samples, batch, limit))
    if not found:
        raise InputError(
            f"a batch of {batch} cannot be divided among {cluster.devices} devices, or the model "
            "has fewer operations than there are stages; give another batch or fewer devices"
        )
    return ranked(found, cluster, keep)


def ranked(found: Sequence[Choice], cluster: Cluster, keep: int) -> TrainingPlan:
    """The fastest of these that fit, or those that lack least."""
    if fitting := [each for each in found if each.fits]:
        return TrainingPlan(
            tuple(sorted(fitting, key=lambda each: each.predicted.seconds)[:keep]), cluster
        )
    lacks = {id(each): sum(each.predicted.over((cluster.memory,) * each.stages)) for each in found}
    by = sorted(found, key=lambda each: (lacks[id(each)], each.predicted.seconds))
    return TrainingPlan(tuple(by[:keep]), cluster)


def _best_of_each(found: Sequence[Predicted]) -> Iterator[Predicted]:
    """The best for each number of micro-batches, recomputation and offloading: equally fast
    schedules are told once, by the one that holds the least."""
    alike: dict[tuple[int, Modes, Modes], list[Predicted]] = {}
    for each in found:
        key = each.candidate.microbatches, each.candidate.recompute, each.candidate.offload
        alike.setdefault(key, []).append(each)
    yield from map(best_of, alike.values())


class _Predictor:
    """Simulates candidates for the stages of a layout."""

    def __init__(self, stages: Stages, layout: Layout, batch: int, peaks: Peaks | None) -> None:
        self.batch, self._peaks = batch, peaks
        self._stages, self._layout = stages, layout
        self._simulations: dict[Candidate, Simulation] = {}

    def _samples(self, count: int) -> int:
        return ceil(self.batch / count)

    def least(self, recipe: Recipe, count: int) -> float:
        times = self._stages.times(self._samples(count))
        return least_seconds(times, recipe, count, self._layout.stages)

    def predict(self, candidate: Candidate) -> Predicted | None:
        count, layout = candidate.microbatches, self._layout
        samples = self._samples(count)
        try:
            schedule = add_recompute(candidate.recipe(layout.stages, count), candidate.recompute)
            schedule = add_offload(schedule, candidate.offload) if candidate.offload else schedule
            found = simulate_schedule(
                schedule,
                self._stages.times(samples),
                links=layout.links,
                sizes=self._stages.sizes(samples),
                replicas=layout.replicas,
                overhead=self._stages.profile.overheads.instruction,
            )
        except FxpipeError:  # it is not for so many devices and micro-batches
            return None
        seconds, idle = found.makespan, found.bubble
        if found.steps > 1:  # batches overlap
            seconds, idle = found.steady.period, abs(found.steady.bubble)
        seconds += self._stages.profile.overheads.step
        self._simulations[candidate] = found

        def held() -> tuple[float, ...]:
            if self._peaks is not None:
                return self._peaks(self._stages, layout.replicas, candidate)
            return tuple(float(memory.peak) for memory in found.memory)

        return Predicted(candidate, seconds, held, idle)

    def limit(self, made: Predicted) -> str:
        """What takes the largest part of the step besides what must be computed anyway."""
        found, stages = self._simulations[made.candidate], range(self._layout.stages)
        count = made.candidate.microbatches
        times = self._stages.times(self._samples(count))
        work = [count * (times["F", s] + times["B", s]) for s in stages]
        mean = sum(work) / len(work)
        idles = found.idle
        again = [s for s, mode in enumerate(made.candidate.recompute) if mode != "never"]
        stored = sum(idle.copying.get(d, 0.0) for d, idle in enumerate(idles)) / len(idles)
        parts = {
            "the slowest stage": max(work) - mean,
            "transfers": sum(sum(idle.copying.values()) for idle in idles) / len(idles) - stored,
            "offloading": stored,
            "sums over replicas": max(
                max(idle.summing for idle in idles),
                found.makespan - found.through - max(times["U", s] for s in stages)
                if self._layout.replicas > 1
                else 0.0,
            ),
            "recomputation": sum(count * times["F", s] for s in again) / len(work),
        }
        parts["idle devices"] = max(0.0, made.idle * made.seconds - sum(parts.values()))
        worst = max(parts, key=parts.__getitem__)
        return worst if parts[worst] > _SMALL * made.seconds else "computing"


_SMALL = 0.05
"""A part of the step that is smaller does not limit it."""
