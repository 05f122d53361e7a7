"""Decide what ``schedule="search"`` and ``schedule="auto"`` leave open, by prediction."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from fxpipe.compiler.compiled import Compiled, Kind
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.predict import step_sizes
from fxpipe.compiler.timetable import Timetable
from fxpipe.errors import FxpipeError, InputError, PartitionError
from fxpipe.ir.plan import Costs, Plan
from fxpipe.ir.recipe import Recipe, find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task
from fxpipe.log import noted
from fxpipe.overheads import overheads
from fxpipe.passes.schedule import modes_of
from fxpipe.planner.candidates import (
    Affine,
    Candidate,
    Modes,
    Predicted,
    best_of,
    evaluate,
    least_seconds,
    microbatch_counts,
    one_stage_each,
)
from fxpipe.runtime.batch import MicroBatches
from fxpipe.search.search import search_schedule
from fxpipe.simulator import simulate
from fxpipe.simulator.costs import Link, Overheads, measured_costs
from fxpipe.simulator.sizes import Sizes
from fxpipe.words import bytes_text

SECONDS = 10.0
"""How long a schedule is searched for, at most."""

_ROUNDS = 4
"""How often, at most, with less memory each time, until the whole program fits."""

_FRUGAL = find_recipe("zb-h1")
"""The stages are made for it first: it keeps few micro-batches, and has backwards in halves."""


class Deciding(Compiler):
    """A compiler that decides at the first step, and again at a larger batch.

    The model is traced, measured and cut for a schedule that keeps few micro-batches, and all
    candidates are lowered and simulated over these stages. Where not even the best one keeps the
    memory limits, the model is cut anew, as for any schedule, with what is missing left free.
    """

    _size = 0

    def _follow(self, timetable: Timetable) -> None:
        """Make the schedules of this timetable from now on."""
        self.timetable = self._placement.timetable = timetable
        self._programs.clear()
        self._known.clear()

    def decides(self, micro: MicroBatches) -> bool:
        """Whether a step of this batch is still to be decided on."""
        return micro.batch.size > self._size

    def decide(self, micro: MicroBatches, *, updates: bool) -> int:
        """Decide on steps of batches of at most this size; returns the number of micro-batches.

        Raises:
            PartitionError: nothing is predicted to keep the memory limits; it has what is missing.
        """
        options, size = self.options, micro.batch.size
        if options.replicas > 1:
            size = min(options.group.exchange("the samples of a batch", size))
        count = min(size, options.microbatches or 4 * len(options.devices))
        before, recompute = self.timetable, options.recompute
        ways = [(before.changed(recipe=_FRUGAL), count)]
        if options.decides == "auto":
            again = "always" if recompute == "never" else recompute
            ways = [(before.changed(recipe=_FRUGAL, recompute=again), count)]
            if not self._placement.judged or self.verdict is None:
                least = find_recipe("naive")
                most = options.microbatches or size
                ways.append((before.changed(recipe=least, recompute=again), most))
            self._fixed = (None, True) if options.microbatches else (False, True)
        nearest: list[Predicted] = []
        with self._compiling(f'{type(options.model).__name__} for schedule="{options.decides}"'):
            for timetable, count in ways:
                try:
                    found = self._decided(timetable, micro, count, size, updates, nearest)
                    break
                except PartitionError as error:
                    why = error
                    if self._size == 0:
                        self._forget()
                        self._placement.forget()
            else:
                self._follow(before)
                if not nearest:
                    raise why
                limits = self._placement.limits
                least_of_all = min(nearest, key=lambda each: sum(each.over(limits)))
                raise PartitionError(_refusal(least_of_all, limits, options.names)) from why
            choice = found.candidate
            self._follow(before.changed(recipe=choice.recipe, recompute=choice.recompute))
        self._size = size
        noted(f'schedule="{options.decides}" takes {found}')
        return choice.microbatches

    def _decided(
        self,
        timetable: Timetable,
        micro: MicroBatches,
        count: int,
        size: int,
        updates: bool,
        nearest: list[Predicted],
    ) -> Predicted:
        """The best candidate over stages that are made for a timetable; what exceeds limits goes
        to ``nearest``.

        Raises:
            PartitionError: none keeps the limits.
        """
        options, limits = self.options, self._placement.limits
        kind = Kind("step", updates, (False,) * len(micro.batch.leaves), False)
        micro = micro.batch.in_parts(count, micro.replica)
        while True:
            self._follow(timetable)
            stages = _Stages(self, limits, self._compile(micro, kind), size, updates)
            found = stages.searched() if options.decides == "search" else stages.fastest()
            if not found.fits(limits):
                nearest.append(found)
                if self._placement.judged:
                    raise PartitionError("the stages are made, and stay as they are")
            if self._placement.judged or self._placement.keeps_limits(found.peaks):
                self._placement.costs = stages.costs(found.candidate.microbatches)
                return found
            self._forget()


class _Stages:
    """The stages that a model was cut into, as candidates use them."""

    def __init__(
        self,
        compiler: Compiler,
        limits: Sequence[float],
        compiled: Compiled,
        size: int,
        updates: bool,
    ) -> None:
        """Nothing is predicted yet.

        Args:
            compiler: has the options, and lowers.
            limits: device → the bytes that it may hold.
            compiled: a step of these stages.
            size: the samples of a batch.
            updates: whether a step updates the weights.
        """
        self._compiler, self._compiled, self._updates = compiler, compiled, updates
        self._size, self._options = size, compiler.options
        self._graph = compiler.plans.graph_of(compiled.traced)
        self._limits = limits
        self._limited = any(limit < math.inf for limit in self._limits)
        own = compiled.samples
        self._times = {own: measured_costs(compiled.plan)}
        other = (
            own // 4 if own >= 8 else min(4 * own, size)
        )  # a single sample has a graph of its own
        if self._options.decides == "auto" and self._options.microbatches is None and other != own:
            with suppress(FxpipeError):  # it takes micro-batches of this size alone
                at_other = compiler.plans.costs_at(self._graph, other)
                stages = [replace(s, costs=at_other[s.index]) for s in compiled.plan.stages]
                plan = replace(compiled.plan, stages=tuple(stages))
                self._times[other] = measured_costs(plan)
        self._sizes: dict[int, tuple[Plan, Sizes]] = {}
        # that of several processes would have to be the same in all, and streams hide theirs
        here = self._options.group.size == 1 and not self._options.places
        self._besides = overheads() if here else Overheads()
        self._serial = here and compiled.threads == 1

    @property
    def _modes(self) -> Modes:
        return modes_of(self._options.recompute, len(self._limits))

    def fastest(self) -> Predicted:
        """The best of the library's schedules, numbers of micro-batches and recomputations."""
        options, devices = self._options, len(self._limits)
        counts = [options.microbatches] if options.microbatches else None
        ways = [
            (recipe, count)
            for recipe in one_stage_each(devices)
            for count in counts or microbatch_counts(self._size, devices)
        ]
        free = options.recompute == "never"
        found = evaluate(
            ways, None if free else self._modes, self._limits, self._least, self._predict
        )
        if not found:
            raise InputError("no schedule of the library can run these stages; name one yourself")
        return best_of([each for each in found if each.fits(self._limits)] or found[:1])

    def searched(self) -> Predicted:
        """The best schedule that a search finds, with as many micro-batches as are given."""
        count, memory = len(self._compiled.kernels), self._limits
        for _ in range(_ROUNDS):
            recipe = _as_recipe(self._search(count, memory))
            made = self._predict(Candidate(recipe, count, self._modes))
            if made is None:
                raise InputError("these stages cannot run in halves; name a schedule yourself")
            found = made
            over = found.over(self._limits)
            if not any(over):
                break
            memory = tuple(most - more for most, more in zip(memory, over, strict=True))
        return found

    def _search(self, count: int, memory: Sequence[float]) -> Schedule:
        """A schedule for the stages' times and bytes, each stage handing one value to the next."""
        times, devices = dict(self._times_at(self._size, count)), len(memory)
        modes, sizes = self._modes, None
        again = [stage for stage, mode in enumerate(modes) if mode != "never"]
        times |= {(x, s): times[x, s] + times["R", s] for x in "BI" for s in again}
        if self._limited:
            plan, held = self._held(-(-self._size // count))
            sizes = _of_a_chain(plan, held, again)

        def search() -> tuple[str, str]:
            try:
                found = search_schedule(
                    times,
                    count,
                    placement=range(devices),
                    memory=memory if sizes else None,
                    sizes=sizes,
                    seconds=SECONDS,
                )
            except InputError as error:  # of the memory; all ranks are to know it
                return "", str(error)
            return str(found.schedule), ""

        text, why = self._options.group.share("the schedule", search)
        if why:
            raise PartitionError(f'{why}; schedule="auto" chooses recomputation and micro-batches')
        return Schedule.parse(text)

    def _times_at(self, size: int, count: int) -> Mapping[tuple[str, int], float]:
        """The times of tasks where so many samples are split into so many micro-batches."""
        samples, keys = -(-size // count), next(iter(self._times.values()))
        return {
            key: Affine({at: times[key] for at, times in self._times.items()})(samples)
            for key in keys
        }

    def costs(self, count: int) -> Mapping[int, Costs]:
        """Stage → what it costs, where the batch is split into so many micro-batches."""
        times = self._times_at(self._size, count)
        return {s: Costs(*(times[x, s] for x in "FBIW")) for s in range(len(self._limits))}

    def _least(self, recipe: Recipe, count: int) -> float:
        return least_seconds(self._times_at(self._size, count), recipe, count, len(self._limits))

    def _held(self, samples: int) -> tuple[Plan, Sizes]:
        """The plan for micro-batches of that size, and what its stages hold."""
        if samples not in self._sizes:
            made = self._compiler.resized(self._compiled, self._graph, samples, self._updates)
            sizes = step_sizes(made, self._compiler.options, self._updates)
            self._sizes[samples] = made.plan, sizes
        return self._sizes[samples]

    def _predict(self, candidate: Candidate) -> Predicted | None:
        """What a step is predicted to need; None where these stages cannot run it."""
        count, plan, sizes = candidate.microbatches, self._compiled.plan, Sizes()
        timetable = self._compiler.timetable.changed(
            recipe=candidate.recipe, recompute=candidate.recompute
        )
        leaves = self._compiled.traced.leaves
        try:
            schedule = timetable.schedule(count, "step")
            if "I" in schedule.kinds and ("I" not in self._compiled.schedule.kinds or leaves):
                return None
            if self._limited:
                plan, sizes = self._held(-(-self._size // count))
            program = self._compiler.lowered(plan, schedule, "step", self._updates)
        except FxpipeError:
            return None
        times = self._times_at(self._size, count)
        besides = self._besides
        found = simulate(
            program,
            {key: besides.task + time for key, time in times.items()},
            links=Link(besides.hand_over),
            overhead=besides.instruction,
            sizes=sizes,
            serial=self._serial,
        )
        peaks = [float(stash * -(-self._size // count)) for stash in found.device_stash]
        if self._limited:
            peaks = [float(memory.peak) for memory in found.memory]
        return Predicted(candidate, found.makespan, tuple(peaks), found.bubble)


def _as_recipe(schedule: Schedule) -> Recipe:
    """A schedule that was found, as a recipe; fewer micro-batches leave out the last ones."""

    def tasks(device: int, devices: int, microbatches: int) -> list[Task]:
        return [t for t in schedule.rows[device] if (t.microbatch or 0) < microbatches]

    return Recipe("search", tasks)


def _of_a_chain(plan: Plan, held: Sizes, again: Collection[int]) -> Sizes:
    """The same bytes where each stage hands all that it sends to the next one. A stage that
    recomputes keeps what it saves for one micro-batch at a time."""
    stages = range(len(plan.stages))
    sent: dict[str, int] = {}
    for edge in plan.edges:
        if edge.source in stages and edge.target in stages:
            size = held.values.get(edge.value, 0)
            sent[f"y{edge.source}"] = sent.get(f"y{edge.source}", 0) + size
    keeps = dict(held.saved)
    return replace(
        held,
        values=sent,
        saved={s: 0 if s in again else keeps.get(s, 0) for s in stages},
        optimizer={s: held.optimizer.get(s, 0) + keeps.get(s, 0) * (s in again) for s in stages},
        holds={},
        deferred_holds={},
        deferred_gradients={},
        places={},
        laid_out={},
        runs={},
        adding={},
    )


def _refusal(least: Predicted, limits: Sequence[float], names: Sequence[str]) -> str:
    """What is missing where the candidate runs that lacks the least, and what would be enough."""
    parts = [
        f"{name} is predicted to hold at least {bytes_text(peak)} in a step and may take "
        f"{bytes_text(most)}, {bytes_text(lacks)} too little"
        for name, peak, most, lacks in zip(
            names, least.peaks, limits, least.over(limits), strict=True
        )
        if lacks
    ]
    enough = [
        None if most == math.inf else math.ceil(max(most, peak))
        for most, peak in zip(limits, least.peaks, strict=True)
    ]
    return (
        f"{'; '.join(parts)}; memory_limits={enough} is predicted to be enough, with "
        f"{least.candidate}; or give more devices or smaller batches"
    )
