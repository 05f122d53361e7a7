"""Compare all schedules of the library: time, bubble, memory and versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real

import fxpipe.schedules as library
from fxpipe.arguments import check_whole
from fxpipe.errors import FxpipeError, InputError
from fxpipe.extensions.draw.canvas import BoxStyle, Canvas
from fxpipe.extensions.draw.chart import Chart, LegendEntry
from fxpipe.extensions.draw.picture import FORWARD, OTHER, UPDATE, Picture
from fxpipe.extensions.simulator import Simulation, simulate_schedule
from fxpipe.extensions.simulator.costs import Costs, check_keys, measured_costs, times_of
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.formatting import bytes_text, plain_table, preformatted, table_text, time_text
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS
from fxpipe.pipeline import Pipeline

_BARS = 480.0
_LONGEST = 2.0
"""Bars end at this many times the shortest bar; their labels have the numbers."""

_HALVES = ("I", "W")


@dataclass(frozen=True)
class Compared:
    """The time and memory of a schedule.

    Attributes:
        name: the schedule's name.
        time: the time of a step; if batches overlap, in the long run.
        bubble: the share of the devices' time that is idle, in the same step.
        memory: the most that any device holds.
        versions: the most versions of its weights that any stage holds.
    """

    name: str
    time: float
    bubble: float
    memory: float
    versions: int


@dataclass(frozen=True)
class Comparison:
    """The library's schedules for so many devices and micro-batches, the fastest first.

    Attributes:
        devices: how many devices.
        microbatches: how many micro-batches.
        rows: the time and memory of each schedule.
        left_out: name of a schedule without a row → the reason.
        limit: the most memory that a device may take; None for any.
        measured: whether times are seconds and memory is bytes, from a pipe.
    """

    devices: int
    microbatches: int
    rows: tuple[Compared, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    limit: float | None = None
    measured: bool = False

    def fits(self, row: Compared) -> bool:
        """Whether a schedule keeps the limit."""
        return self.limit is None or row.memory <= self.limit

    @property
    def best(self) -> Compared | None:
        """The fastest schedule that keeps the limit and has one version of the weights, so that it
        trains like a plain loop; None if there is none."""
        return next((row for row in self.rows if self.fits(row) and row.versions == 1), None)

    def __str__(self) -> str:
        """A table, with the best one marked."""
        title = f"{self.devices} devices, {self.microbatches} micro-batches, stages cut evenly"
        table = plain_table()
        table.add_column("schedule", no_wrap=True)
        for heading in ("time", "bubble", "memory", "versions"):
            table.add_column(heading, justify="right")
        table.add_column("")
        for row in self.rows:
            table.add_row(row.name, *self._texts(row), self._remark(row))
        reasons: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            reasons.setdefault(why, []).append(name)
        unit = "micro-batches kept for backward by" if not self.measured else "held at most by"
        lines = [
            title,
            table_text(table),
            "time: of a step, in the long run where batches overlap; versions: of the weights",
            "bubble: the share of the devices' time that is idle",
            f"memory: {unit} the fullest device",
            *(f"left out: {', '.join(names)} ({why})" for why, names in reasons.items()),
        ]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        return preformatted(str(self))

    def draw(self) -> Picture:
        """Draw a bar for each schedule: its time, with the bubble in grey.

        A bar is cut off at twice the length of the shortest one.
        """
        if not self.rows:
            raise InputError("no schedule is for so many devices and micro-batches; try others")
        unit = 1e3 if self.measured else 1.0
        end = min(self.rows[-1].time, _LONGEST * self.rows[0].time) * unit or 1.0
        canvas = Canvas("comparison")
        what = f"p = {self.devices} · m = {self.microbatches}"
        title = f"schedules · {what}" + (f" · {self._limit()}" if self.limit is not None else "")
        names = [row.name for row in self.rows]
        over = {at for at, row in enumerate(self.rows) if not self.fits(row)}
        chart = Chart(canvas, title, names, end, _BARS / end, wrong=over)
        for at, row in enumerate(self.rows):
            look = BoxStyle(UPDATE if row is self.best else FORWARD)
            time, bubble, memory, versions = self._texts(row)
            tooltip = f"{row.name}: {time}, bubble {bubble}, memory {memory}, versions {versions}"
            corner, scale = (chart.x(0), chart.y(at)), unit * _BARS / end
            whole = min(row.time * scale, _BARS)
            canvas.box(corner, whole, chart.row_height, BoxStyle(OTHER), tooltip=tooltip)
            busy = min(row.time * (1 - row.bubble) * scale, _BARS)
            canvas.box(corner, busy, chart.row_height, look, tooltip=tooltip)
            remark = self._remark(row)
            text = f"{time} · {bubble} · {memory} · {versions}" + (f" · {remark}" if remark else "")
            canvas.text((corner[0] + 4, corner[1]), _BARS, chart.row_height, text, size=8)
        below = chart.axis("milliseconds" if self.measured else "time")
        entries = [
            LegendEntry("computing", BoxStyle(FORWARD)),
            LegendEntry("the best", BoxStyle(UPDATE)),
            LegendEntry("bubble", BoxStyle(OTHER)),
            LegendEntry("time · bubble · memory · versions"),
        ]
        chart.legend(below, entries)
        return canvas.picture

    def _texts(self, row: Compared) -> tuple[str, str, str, str]:
        time = time_text(row.time) if self.measured else f"{row.time:.6g}"
        memory = bytes_text(round(row.memory)) if self.measured else f"{row.memory:.4g}"
        return time, f"{row.bubble:.1%}", memory, str(row.versions)

    def _limit(self) -> str:
        assert self.limit is not None
        return f"at most {bytes_text(round(self.limit)) if self.measured else f'{self.limit:.4g}'}"

    def _remark(self, row: Compared) -> str:
        if row is self.best:
            return "best" if self.limit is None else f"best with {self._limit()}"
        if not self.fits(row):
            return f"over {self._limit().removeprefix('at most ')}"
        return "reads older weights" if row.versions > 1 else ""


def compare(
    pipe: Pipeline | None = None,
    *,
    devices: int | None = None,
    microbatches: int | None = None,
    costs: Costs | None = None,
    memory: float | None = None,
) -> Comparison:
    """Simulate every schedule of the library, each with the model cut evenly into its stages.

    Args:
        pipe: a compiled pipe, for its measured times, predicted bytes and counts. Values between
            stages are not counted, as it is not known where the cuts would be.
        devices: how many devices; by default 4, or the pipe's.
        microbatches: how many micro-batches; by default 8, or the pipe's.
        costs: letter of a task → its time for one device's whole share of the model; by default
            what was measured, or the kind's own cost. If I and W are missing, each takes half of B.
        memory: the most that a device may take: bytes with a pipe, otherwise micro-batches kept for
            backward, of the device's whole share of the model.

    Raises:
        InputError: an argument is not valid, or the pipe is not compiled or not measured yet.
    """
    check_keys(costs)
    given: dict[str, float] = {}
    for key, time in (costs or {}).items():
        if not isinstance(key, str):
            raise InputError(
                f"costs has {key[0]}@{key[1]}, and schedules have different stages; leave out the "
                f"stage: {key[0]}={time}"
            )
        given[key] = time
    times_of(0, (), given)  # raises where one is no time
    totals: dict[str, float] = {}
    held: Sizes | None = None
    p, m = 4, 8
    if pipe is not None:
        measured = measured_costs(pipe.plan)
        if not measured and not {"F", "B"} <= given.keys():
            raise InputError("nothing was measured on this pipe's plan; give costs=")
        for (letter, _), seconds in measured.items():
            totals[letter] = totals.get(letter, 0.0) + seconds
        schedule, held = pipe.schedule, pipe.simulate().sizes
        p, m = schedule.devices, schedule.microbatches
    p, m = devices if devices is not None else p, microbatches if microbatches is not None else m
    check_whole("devices", p, 1)
    check_whole("microbatches", m, 1)
    if memory is not None and not (isinstance(memory, Real) and memory > 0):
        shown = f"{memory:g}" if isinstance(memory, Real) else repr(memory)
        raise InputError(f"memory is {shown}; give what a device may take, above 0")
    totals = {letter: seconds / p for letter, seconds in totals.items()}
    times = {letter: kind.cost for letter, kind in KINDS.items()} if pipe is None else {}
    times |= totals | given
    if "B" in times and not set(_HALVES) & (given if "B" in given else totals | given).keys():
        times |= dict.fromkeys(_HALVES, times["B"] / 2)
    recipes: list[Recipe] = [getattr(library, name) for name in library.__all__]
    rows: list[Compared] = []
    left_out: dict[str, str] = {}
    for recipe in sorted(recipes, key=lambda recipe: recipe.name):
        try:
            schedule = recipe(p, m).verify()
        except FxpipeError:
            left_out[recipe.name] = "is not for so many devices and micro-batches"
            continue
        if schedule.trains:
            rows.append(_row(schedule, times, held))
    rows.sort(key=lambda row: (row.time, row.memory, row.name))
    return Comparison(p, m, tuple(rows), left_out, memory, pipe is not None)


def _row(schedule: Schedule, times: Mapping[str, float], held: Sizes | None) -> Compared:
    """Simulate a schedule in which all stages take equal shares of a device's times and bytes."""
    share = schedule.stages // schedule.devices
    costs = {letter: time / share for letter, time in times.items() if letter in schedule.kinds}
    sizes = None if held is None else _cut_evenly(held, schedule.stages)
    simulated: Simulation = simulate_schedule(schedule, costs, sizes=sizes)
    time, bubble = simulated.makespan, simulated.bubble
    if simulated.steps > 1:
        time, bubble = simulated.steady.period, abs(simulated.steady.bubble)
    most: float = max(simulated.device_stash) / share
    if sizes is not None:
        most = max(memory.peak for memory in simulated.memory)
    return Compared(schedule.name, time, bubble, most, max(simulated.weight_versions))


def _cut_evenly(held: Sizes, stages: int) -> Sizes:
    """The same bytes, with an equal share for each stage."""

    def share(bytes_: Mapping[int, int]) -> dict[int, int]:
        return dict.fromkeys(range(stages), -(-sum(bytes_.values()) // stages))

    saved = dict(held.saved)
    for stage, values in held.holds.items():
        saved[stage] = saved.get(stage, 0) + sum(held.values.get(value, 0) for value in values)
    return Sizes(
        saved=share(saved),
        deferred=share(held.deferred if any(held.deferred.values()) else saved),
        state=share(held.state),
        parameters=share(held.parameters),
        gradients=share(held.gradients),
        started=share(held.started),
        optimizer=share(held.optimizer),
        updating=share(held.updating),
    )
