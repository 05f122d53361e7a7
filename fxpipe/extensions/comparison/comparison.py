"""Compare all schedules of the library: time, bubble, memory and versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real

from fxpipe.arguments import check_whole
from fxpipe.errors import FxpipeError, InputError
from fxpipe.extensions.simulator import simulate_schedule
from fxpipe.extensions.simulator.costs import Costs, check_keys, seconds_of, times_of
from fxpipe.extensions.tables import plain_table, table_text, wrapped
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS
from fxpipe.schedules import library


@dataclass(frozen=True)
class Compared:
    """The time and memory of a schedule.

    Attributes:
        name: the schedule's name.
        time: the time of a step; if batches overlap, in the long run.
        bubble: the share of the devices' time that is idle, in the same step.
        memory: the most micro-batches that any device keeps for backward, of its whole share of
            the model.
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
    """

    devices: int
    microbatches: int
    rows: tuple[Compared, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    limit: float | None = None

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
            texts = f"{row.time:.6g}", f"{row.bubble:.1%}", f"{row.memory:.4g}", str(row.versions)
            table.add_row(row.name, *texts, self._remark(row))
        reasons: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            reasons.setdefault(why, []).append(name)
        lines = [
            title,
            table_text(table),
            "time: of a step, in the long run where batches overlap; versions: of the weights",
            "bubble: the share of the devices' time that is idle",
            "memory: micro-batches kept for backward by the fullest device",
            *(wrapped(f"left out: {', '.join(n)} ({why})") for why, n in reasons.items()),
        ]
        return "\n".join(lines)

    __repr__ = __str__

    def _remark(self, row: Compared) -> str:
        if row is self.best:
            return "best" if self.limit is None else f"best with at most {self.limit:.4g}"
        if not self.fits(row):
            return f"over {self.limit:.4g}"
        return "reads older weights" if row.versions > 1 else ""


def compare(
    *,
    devices: int = 4,
    microbatches: int = 8,
    costs: Costs | None = None,
    memory: float | None = None,
) -> Comparison:
    """Simulate every schedule of the library, each with the model cut evenly into its stages.

    Args:
        devices: how many devices.
        microbatches: how many micro-batches.
        costs: letter of a task → its time for one device's whole share of the model; by default
            the kind's own cost. If I and W are missing, each takes half of B.
        memory: the most micro-batches that a device may keep for backward, of its whole share of
            the model.

    Raises:
        InputError: an argument is not valid.
    """
    check_keys(costs)
    given: dict[str, float] = {}
    for key, time in seconds_of(costs).items():
        if not isinstance(key, str):
            raise InputError(
                f"costs has {key[0]}@{key[1]}, and schedules have different stages; leave out the "
                f"stage: {key[0]}={time}"
            )
        given[key] = time
    times_of(0, (), given)  # raises where one is no time
    check_whole("devices", devices, 1)
    check_whole("microbatches", microbatches, 1)
    if memory is not None and not (isinstance(memory, Real) and memory > 0):
        shown = f"{memory:g}" if isinstance(memory, Real) else repr(memory)
        raise InputError(f"memory is {shown}; give what a device may take, above 0")
    times = {letter: kind.cost for letter, kind in KINDS.items()} | given
    if "B" in given and not {"I", "W"} & given.keys():
        times |= dict.fromkeys("IW", given["B"] / 2)
    recipes = library()
    rows: list[Compared] = []
    left_out: dict[str, str] = {}
    for recipe in sorted(recipes, key=lambda recipe: recipe.name):
        try:
            schedule = recipe(devices, microbatches).verify()
        except FxpipeError:
            left_out[recipe.name] = "is not for so many devices and micro-batches"
            continue
        if schedule.trains:
            rows.append(_row(schedule, times))
    rows.sort(key=lambda row: (row.time, row.memory, row.name))
    return Comparison(devices, microbatches, tuple(rows), left_out, memory)


def _row(schedule: Schedule, times: Mapping[str, float]) -> Compared:
    """Simulate a schedule in which all stages take equal shares of a device's times."""
    share = schedule.stages // schedule.devices
    costs = {letter: time / share for letter, time in times.items() if letter in schedule.kinds}
    simulated = simulate_schedule(schedule, costs)
    time, bubble = simulated.makespan, simulated.bubble
    if simulated.steps > 1:
        time, bubble = simulated.steady.period, simulated.steady.bubble
    most = max(simulated.device_kept) / share
    return Compared(schedule.name, time, bubble, most, max(simulated.weight_versions))
