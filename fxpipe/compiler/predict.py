"""Predict by simulation the seconds and bytes of a plan, the largest micro-batch that fits into
memory, and the options with which a step that does not fit would."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import mean
from typing import TYPE_CHECKING, Any

from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.options import Options
from fxpipe.compiler.overheads import away_rates
from fxpipe.compiler.timetable import Timetable
from fxpipe.errors import FxpipeError, InputError
from fxpipe.formatting import bytes_text, plural, preformatted, table_text
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.value import HOST
from fxpipe.memory.held import plan_sizes
from fxpipe.runtime.weights.optimizer import state_size
from fxpipe.runtime.weights.sharding import Shards
from fxpipe.simulator import Simulation, simulate
from fxpipe.simulator.costs import (
    Costs,
    Key,
    Link,
    Links,
    Rehearsal,
    check_keys,
    measured_costs,
)
from fxpipe.simulator.sizes import Sizes as StageSizes
from fxpipe.torchtools.state import processors

if TYPE_CHECKING:
    from fxpipe.passes.graph.extents import Extent

_MOST = 1 << 20
"""The largest micro-batch, in samples, that is tried."""

_LESS_MEMORY = ("1f1b", "interleaved-1f1b", "zb-h1", "v-half", "v-min")
"""Schedules with a flush that keep fewer micro-batches than others of the same placement."""


def predict(
    plan: Plan,
    program: Program,
    sizes: StageSizes,
    costs: Costs | None = None,
    *,
    rehearsal: Rehearsal | None = None,
    links: Links | None = None,
    overlap: bool = True,
    steps: int | None = None,
    away: tuple[float, float] | None = None,
) -> Simulation:
    """Simulate a program with the costs that were measured on its plan.

    Args:
        costs: costs by kind of task; they replace the measured ones of that kind.
        rehearsal: the times of tasks as they run; without it, the times of each stage alone count,
            and instructions that compute nothing take no time.
        away: the bytes per second that offloads store and fetch; by default as measured.

    Raises:
        InputError: nothing was measured and no costs are given, or the given costs do not fit.
    """
    check_keys(costs)
    given: dict[Key, float] = dict((costs or {}).items())
    measured = {key: t for key, t in measured_costs(plan).items() if key[0] not in given}
    place = next((spec.device for spec in plan.specs.values()), "cpu")
    transfers = _away_costs(plan, program, sizes, away or place)
    measured |= {key: t for key, t in transfers.items() if key[0] not in given}
    run = partial(simulate, program, overlap=overlap, sizes=sizes, steps=steps)
    if rehearsal is None or given:
        if not (all_costs := measured | given):
            raise InputError(
                "nothing was measured on this plan; give costs=, such as those of pipe.profile(...)"
            )
        return replace(run(all_costs, links=links), seconds=True)
    simulation = run(
        measured | rehearsal.known,
        links=rehearsal.links if links is None else links,
        overhead=rehearsal.overheads.instruction,
        serial=rehearsal.serial,
        # if the devices' threads take all processors, they take turns with threads that store;
        # rehearsed steps that have stored contain that already
        beside=place != "cpu"
        or (1 if rehearsal.serial else program.devices) < processors()
        or transfers.keys() <= rehearsal.costs.keys(),
    )
    return replace(simulation, seconds=True, outside=rehearsal.overheads.step, off=rehearsal.off)


def given_links(options: Options) -> Links | None:
    """The links between devices of the ``Partition``; None if it has none."""
    links = options.partition.links(len(options.devices))
    return {pair: Link(*link) for pair, link in links.items()} or None


def _away_costs(
    plan: Plan, program: Program, sizes: StageSizes, rates: tuple[float, float] | str
) -> dict[tuple[str, int], float]:
    """The seconds to store what a stage keeps of a micro-batch ("O"), and to fetch it ("P"), at
    these rates, or at those of a type of device."""
    if not program.offloads or not measured_costs(plan):
        return {}
    stored: dict[int, list[int]] = {}
    for (stage, _), forward in program.offloads.items():
        inputs = {edge.value: edge.source for edge in program.edges_into[stage]}
        held = inputs if forward.again else sizes.holds.get(stage, ())
        moved = [value for value in held if inputs.get(value) != HOST]
        size = 0 if forward.again else sizes.saved.get(stage, 0)
        size += sum(sizes.values.get(value, 0) for value in moved)
        stored.setdefault(stage, []).append(size)
    ways = zip("OP", away_rates(rates) if isinstance(rates, str) else rates, strict=True)
    return {(way, s): mean(sizes) / rate for way, rate in ways for s, sizes in stored.items()}


def predicted_peaks(plan: Plan, program: Program, sizes: StageSizes) -> list[int]:
    """Device → the most bytes that it is predicted to hold, as ``pipe.simulate()`` shows it."""
    return [memory.peak for memory in predict_memory(plan, program, sizes).memory]


def predict_memory(plan: Plan, program: Program, sizes: StageSizes) -> Simulation:
    """``predict`` for the memory only: if nothing was measured, tasks take units of time."""
    return predict(plan, program, sizes, None if measured_costs(plan) else {"F": 1.0})


def held_sizes(
    compiled: Compiled,
    options: Options,
    state: Mapping[str, Tensor],
    own: Sequence[Optimizer | None] | None,
    *,
    stepping: bool,
) -> StageSizes:
    """Count the bytes that the stages of all processes and their optimizers hold.

    Args:
        state: name in the model → parameter or buffer.
        own: stage → the optimizer that this process has; None if it has none yet.
        stepping: whether optimizers step. Those that this process does not have are then made, only
            to be counted. If they are sharded, all are made, with the parts of the last replica,
            which are the largest.
    """
    plan, given = compiled.plan, options.optimizer if stepping else None
    optimizers = [*(own or [None] * len(plan.stages))]
    elsewhere = {s.index for s in plan.stages if own is not None and not options.owns(s.index)}
    for stage in plan.stages:
        parameters = {a.target: state[a.target] for a in stage.parameters}
        missing = own is None or stage.index in elsewhere or options.shards
        if given is not None and parameters and missing:
            optimizers[stage.index] = optimizer = given.of(parameters)
            if options.shards:
                Shards(optimizer, [*parameters.values()], options.replicas - 1, options.replicas)
    return plan_sizes(
        plan,
        state,
        optimizers,
        compiled.schedule,
        early=options.early(compiled.program),
        elsewhere=elsewhere,
        shards=options.shards,
    )


def step_sizes(compiled: Compiled, options: Options, updates: bool) -> StageSizes:
    """The bytes that the stages hold in a step. Without ``optimizer=``, the state of an Adam that
    the caller steps is included."""
    state = compiled.traced.state_of(options.model)
    sizes = held_sizes(compiled, options, state, None, stepping=updates)
    if updates:
        return sizes
    adam = {s: int(state_size(None) * size) for s, size in sizes.gradients.items()}
    return replace(sizes, optimizer={s: size + adam[s] for s, size in sizes.optimizer.items()})


def split_target(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Any]:
    """Split the arguments of a call such as ``profile(x, y)`` into inputs and target.

    The last argument is the target if the model's forward does not take all arguments.
    """
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return args[:-1], args[-1] if args else None
    return args, None


@dataclass(frozen=True)
class Sizes:
    """FLOPs and bytes of the stages as expressions in ``b``, the samples of a micro-batch.

    Attributes:
        stages: stage → FLOPs, bytes saved and bytes sent for a micro-batch.
        devices: device → its name.
        limits: device → the bytes that it may hold; infinite if there is no limit.
        samples: the samples in a micro-batch now.
        peaks: samples in a micro-batch → for each device the most bytes that it is predicted to
            hold in a step with these stages, recompute and optimizer, as ``simulate`` shows it.
            Without ``optimizer=``, the state of an Adam that the caller steps is included.
    """

    stages: tuple[Extent, ...]
    devices: tuple[str, ...]
    limits: tuple[float, ...]
    samples: int
    peaks: Callable[[int], Sequence[float]] = field(repr=False, compare=False)

    @cached_property
    def largest(self) -> int | None:
        """The most samples that a micro-batch may have if all devices are to keep their limits with
        these stages, as predicted. 0 if not even one sample fits; None if there is no limit, or
        2²⁰ samples still fit.

        Raises:
            TraceError: the model cannot be traced for another size.
        """
        if all(limit == math.inf for limit in self.limits):
            return None
        known: dict[int, Sequence[float]] = {}
        low, high, next_ = 0, _MOST + 1, self.samples
        while high - low > 1:
            known[next_] = self.peaks(next_)
            if all(map(operator.le, known[next_], self.limits)):
                low = next_
            else:
                high = next_
            next_ = min(max(self._guess(known), low + 1), high - 1, max(8 * low, self.samples))
        return None if low == _MOST else low

    def _guess(self, known: dict[int, Sequence[float]]) -> int:
        """The samples that reach the limits if memory grows linearly, as between the two known
        sizes that are nearest to the limits."""
        if len(known) == 1:
            return max(known) // 2
        (a, at_a), (b, at_b) = sorted(known.items())[-2:]
        slopes = [(y - x) / (b - a) for x, y in zip(at_a, at_b, strict=True)]
        ends = [
            b + (limit - y) / slope
            for slope, y, limit in zip(slopes, at_b, self.limits, strict=True)
            if slope > 0
        ]
        return int(min(ends, default=_MOST))

    def __str__(self) -> str:
        """A table, and the largest micro-batch if memory is limited."""
        table = Table()
        for heading in ("stage", "forward FLOPs", "backward FLOPs", "saved B", "sent B"):
            table.add_column(heading, justify="right", overflow="fold")
        for stage, extent in enumerate(self.stages):
            terms = (extent.forward, extent.backward, extent.saved, extent.sent)
            table.add_row(str(stage), *map(str, terms))
        notes = ["b: samples in a micro-batch", *self.verdict()]
        return "\n".join([table_text(table, 130), *notes])

    def __repr__(self) -> str:
        return f"<Sizes: {plural(len(self.stages), 'stage')}, {self.samples} samples a micro-batch>"

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def verdict(self) -> Sequence[str]:
        """A line on the largest micro-batch; no line if memory is not limited."""
        if all(limit == math.inf for limit in self.limits):
            return []
        try:
            largest = self.largest
        except FxpipeError:
            return ["the largest micro-batch that fits is not known: the model takes one size only"]
        if largest is None:
            return ["any micro-batch fits the memory limits, as predicted"]
        if not largest:
            return ["no micro-batch fits the memory limits with these stages, as predicted"]
        peaks = self.peaks(largest)
        tightest = max(range(len(peaks)), key=lambda device: peaks[device] / self.limits[device])
        return [
            f"the largest micro-batch that fits the memory limits with these stages has {largest} "
            f"samples, as predicted ({self.devices[tightest]} then holds "
            f"{bytes_text(peaks[tightest])} of {bytes_text(self.limits[tightest])})"
        ]


def remedies(
    timetable: Timetable, schedule: Schedule, samples: int, fits: Callable[[Schedule], bool]
) -> str:
    """The end of an error message: options each of which would be enough alone for a step of this
    schedule, at most one of a kind. ``fits`` tells whether the same stages would keep the limits
    under another schedule, and raises FxpipeError if they cannot run it."""
    count = schedule.microbatches
    recompute = [('recompute="always"', timetable.changed(recompute="always"), count)]
    both = timetable.changed(recompute="always", offload="always")
    offload = [
        ('offload="always"', timetable.changed(offload="always"), count),
        ('recompute="always" with offload="always"', both, count),
    ]
    schedules = [
        (f'schedule="{name}"', timetable.changed(recipe=find_recipe(name)), count)
        for name in _LESS_MEMORY
        if name != schedule.name and find_recipe(name).place(schedule.devices) == schedule.placement
    ]
    counts = [count * 2**power for power in range(1, (samples // count).bit_length())]
    finer = [(f"microbatches={more}", timetable, more) for more in counts]
    enough = []
    for kind in (recompute, offload, schedules, finer):
        for text, changed, parts in kind:
            with suppress(FxpipeError):  # the pipe cannot run with this option
                if fits(changed.schedule(parts, "step")):
                    enough.append(text)
                    break
    if not enough:
        return (
            "no recompute, offload, schedule or number of micro-batches is predicted to be enough"
        )
    return f"predicted to be enough with the same stages: {' or '.join(enough)}"
