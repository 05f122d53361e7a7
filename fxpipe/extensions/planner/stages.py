"""Predict candidate schedules over stages that exist."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.front_end import Call
from fxpipe.compiler.options import Options
from fxpipe.errors import FxpipeError, InputError
from fxpipe.extend import Extension, find, there
from fxpipe.extensions.planner.bounds import LeastMemory, Modes, least_seconds
from fxpipe.extensions.planner.candidates import (
    EXACT,
    Candidate,
    Predicted,
    best_of,
    evaluate,
    interpolated,
    library_over,
    microbatch_counts,
)
from fxpipe.extensions.simulator.away import away_rates
from fxpipe.extensions.simulator.costs import Link, Times, measured_costs
from fxpipe.extensions.simulator.pipe import given_links, held_sizes, predict_step
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.ir.plan import Plan, StageCosts
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import BESIDE, KINDS
from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.assignment import Assignment
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.passes.schedule import modes_of
from fxpipe.runtime.choice import HAND_OVER, TASK, WAKE, operations

FAMILIES = ("zb-h1", "v-half", "interleaved-1f1b")
"""For each possible placement of the stages (one or two on each device) the schedule that they are
cut for, which keeps few micro-batches."""


class Stages:
    """The stages that a model was cut into, with the times of their operations.

    Attributes:
        compiler: has the options, and lowers.
    """

    def __init__(
        self,
        compiler: Compiler,
        limits: Sequence[float],
        compiled: Compiled,
        size: int,
        updates: bool,
        nodes: dict[int, tuple[Traced, Mapping[str, NodeCost]]],
    ) -> None:
        """Prepare predictions over the stages of a compiled step.

        Args:
            limits: device → the bytes that it may hold.
            compiled: a step of these stages.
            size: the samples of a batch.
            nodes: samples of a micro-batch → the model's graph for it, and what its nodes cost. It
                grows by those that are measured, as they are the same for other cuts.
        """
        self._nodes = nodes
        self.compiler, self._compiled, self._updates = compiler, compiled, updates
        self._placement = compiled.schedule.placement
        self._size, self._options = size, compiler.options
        graphs = compiler.memo.values("graph")
        self._graph = next(g for g in graphs if g.traced.module is compiled.traced.module)
        self._limits, self._links = limits, given_links(compiler.options)
        self._devices, self._limited = len(limits), any(limit < math.inf for limit in limits)
        group = compiler.options.group  # all ranks take the rates of the first: they choose alike
        rates = partial(away_rates, compiler.options.here.type)
        self._away = group.share("how fast tensors are stored", rates) if group.size > 1 else None
        self._calls: dict[int, Compiled] = {}
        self._sizes: dict[int, Sizes] = {}
        self._alone = group.size == 1 and not self._options.places
        # samples of a micro-batch → the times of tasks
        self._measured: dict[int, Times] = {compiled.samples: _of_operations(compiled.plan)}
        self._fixed = {
            (letter, stage.index): count
            for stage in compiled.plan.stages
            for letter, count in operations(stage).items()
        }
        self._serially: dict[int, bool] = {}
        self._taken: dict[int, dict[tuple[str, int], float]] = {}
        self._schedules: dict[tuple[Recipe, int], Schedule] = {}
        self._least: dict[tuple[Any, ...], float] = {}
        self._measure_further()

    def _measure_further(self) -> None:
        """Measure the operations for two more sizes of micro-batches, if their number is chosen: a
        smaller one, as what is fixed counts most there, and one of a batch with a micro-batch for
        each device."""
        if self._options.microbatches is not None:
            return
        samples, placement = self._compiled.samples, self.compiler.plans.placement
        for further in {-(-samples // 4), -(-self._size // self._devices)} - {samples}:
            with suppress(FxpipeError):  # the graph may hold for one size of micro-batch only
                if further not in self._nodes:
                    with self._resized(further) as (call, traced, _):
                        facts = call.as_trained(traced, self._options.model)
                        self._nodes[further] = traced, placement.node_costs(facts)
                traced, nodes = self._nodes[further]
                followed = placement.follow(traced, self._graph.traced, self._graph.assignment)
                costs = placement.by_stage(traced, followed, nodes)
                stages = [replace(s, costs=costs[s.index]) for s in self._compiled.plan.stages]
                plan = replace(self._compiled.plan, stages=tuple(stages))
                self._measured[further] = _of_operations(plan)

    @property
    def _modes(self) -> Modes:
        return modes_of(self._options.recompute, len(self._placement))

    def fastest(self, worth: float = math.inf) -> Predicted:
        """The best of the library's schedules, numbers of micro-batches and recomputations.

        Raises:
            InputError: these stages run none of them, or none in less than ``worth`` seconds.
        """
        options = self._options
        counts = [options.microbatches] if options.microbatches else None
        flush = not self._compiled.schedule.overlaps
        schedules = [
            (recipe, count)
            for recipe in library_over(self._devices, lambda _: self._placement, flush=flush)
            for count in counts or microbatch_counts(self._size, self._devices)
        ]
        free = options.recompute == "never"
        given = offload_of(options)
        asked = modes_of(given.modes if given else "never", len(self._placement))
        may_offload = free and there("extension", "offload") and not options.holds_saved
        offload_free = may_offload and set(asked) == {"never"}
        results = evaluate(
            schedules,
            None if free else self._modes,
            self._limits,
            self,
            self.predict,
            offload=None if offload_free else asked,
            worth=worth,
        )
        if not results:
            raise InputError("no schedule of the library can run these stages; name one yourself")
        return best_of([each for each in results if each.fits(self._limits)] or results[:1])

    def may_be_beaten(self, seconds: float) -> bool:
        """Whether other stages of the model could take less, if their devices were never idle."""
        given = self._options.microbatches
        counts = [given] if given else microbatch_counts(self._size, self._devices)
        return seconds > EXACT * min(map(self._unhindered, counts))

    def _unhindered(self, count: int) -> float:
        """The seconds of a step whose devices, or the one thread of all, are never idle."""
        times = self._times(count)
        work = count * sum(time for (letter, _), time in times.items() if letter in "FB")
        return work / (1 if self._serial(count) else self._devices)

    def _serial(self, count: int) -> bool:
        """Whether one thread is to run all devices if the batch is split into ``count``
        micro-batches."""
        if count not in self._serially:
            costs, plan = self.costs(count), self._compiled.plan
            plan = replace(
                plan, stages=tuple(replace(s, costs=costs[s.index]) for s in plan.stages)
            )
            schedule = replace(self._compiled.schedule, microbatches=count)
            one = self._alone and self.compiler.choice.threads(plan, schedule) == 1
            self._serially[count] = one
        return self._serially[count]

    def samples(self, count: int) -> int:
        """The samples of a micro-batch if the batch is split into ``count`` micro-batches."""
        return -(-self._size // count)

    def _known(self, samples: int) -> dict[tuple[str, int], float]:
        """The times of tasks in micro-batches of this size, interpolated between the sizes that
        were measured. Tasks of a whole step do not depend on the size."""
        first = next(iter(self._measured.values()))
        return {
            key: interpolated({n: times[key] for n, times in self._measured.items()}, samples)
            if KINDS[key[0]].per_microbatch
            else time
            for key, time in first.items()
        }

    def costs(self, count: int) -> Mapping[int, StageCosts]:
        """Stage → its costs if the batch is split into ``count`` micro-batches."""
        times = self._known(self.samples(count))
        return {s: StageCosts(*(times[x, s] for x in "FBIW")) for s in range(len(self._placement))}

    def _times(self, count: int) -> dict[tuple[str, int], float]:
        """The times of tasks if the batch is split into ``count`` micro-batches: of operations, and
        of what a task and, with a thread for each device, an operation takes besides."""
        if count not in self._taken:
            handed = 0.0 if self._serial(count) or not self._alone else HAND_OVER
            self._taken[count] = {
                key: time + TASK + handed * self._fixed.get(key, 0)
                if KINDS[key[0]].per_microbatch
                else time
                for key, time in self._known(self.samples(count)).items()
            }
        return self._taken[count]

    def seconds(self, candidate: Candidate) -> float:
        """A lower bound for the seconds of a step. Raises InputError if there is no schedule."""
        count, schedule = candidate.microbatches, self._schedule(candidate)
        times = self._times(count)
        if self._serial(count):  # one thread does the work of all devices
            again = sum(times["R", s] for s, x in enumerate(candidate.recompute) if x == "always")
            return self._unhindered(count) + count * again
        return least_seconds(times, schedule, candidate.recompute)

    def peaks(self, candidate: Candidate) -> tuple[float, ...]:
        """Lower bounds for the bytes of the devices; 0 if they cannot be told."""
        count, schedule = candidate.microbatches, self._schedule(candidate)
        modes, found = (candidate.recompute, candidate.offload), []
        for device in range(self._devices):
            held = schedule.held_by(device)
            own = [tuple(x[s] for s in held) if x else () for x in modes]
            key = candidate.recipe, count, device, *own
            if key not in self._least:
                try:
                    least = LeastMemory(
                        schedule, self._held(self.samples(count)), self._compiled.plan
                    )
                    self._least[key] = least.of(device, *modes)
                except FxpipeError:
                    self._least[key] = 0.0
            found.append(self._least[key])
        return tuple(found)

    def _schedule(self, candidate: Candidate) -> Schedule:
        """The schedule of a candidate, without recomputation and offloading."""
        way = candidate.recipe, candidate.microbatches
        if way not in self._schedules:
            schedule = candidate.recipe(self._devices, candidate.microbatches)
            self._schedules[way] = replace(schedule, edges=self._compiled.plan.stage_edges)
        return self._schedules[way]

    def _at(self, samples: int) -> Compiled:
        """The same step for micro-batches of another size, with a plan that is made for zeros, not
        checked, and not kept. Raises FxpipeError as ``Plans.plan``."""
        if samples not in self._calls:
            compiled, plans = self._compiled, self.compiler.plans
            traced, plan = compiled.traced, compiled.plan
            if samples != compiled.samples:
                with self._resized(samples) as (call, followed, assignment):
                    traced, plan = followed, plans.differentiated(followed, assignment, call)
            lowered, purpose = self.compiler.lowered, compiled.purpose
            whole = partial(lowered, plan, compiled.schedule, purpose, self._updates)
            made = replace(compiled, traced=traced, plan=plan, whole=whole, samples=samples)
            self._calls[samples] = made
        return self._calls[samples]

    @contextmanager
    def _resized(self, samples: int) -> Iterator[tuple[Call, Traced, Assignment]]:
        """Yield the step for micro-batches of so many zeros, with a graph for that size and its
        stages. Inside, the model is as in ``Plans.gathered``."""
        plans, graph = self.compiler.plans, self._graph
        plans.look()
        with plans.gathered(replace(graph.call.zeros(), fixed=False)) as here:
            call = _of_size(here, samples)
            traced = plans.trace(here)
            if not traced.accepts(call.shapes):
                traced = plans.trace(call)
            yield call, traced, plans.placement.follow(traced, graph.traced, graph.assignment)

    def _held(self, samples: int) -> Sizes:
        """The bytes that these stages hold, for micro-batches of this size."""
        if samples not in self._sizes:
            call, options = self._at(samples), self.compiler.options
            self._sizes[samples] = held_sizes(call, options, call.traced.state_of(options.model))
        return self._sizes[samples]

    def _lowered(self, candidate: Candidate, *, sized: bool) -> Program:
        """The program of a candidate; if ``sized``, with the sizes of its own
        micro-batches. Raises FxpipeError if these stages cannot run it."""
        timetable = self.compiler.timetable.changed(
            recipe=candidate.recipe,
            recompute=candidate.recompute,
            extensions=with_modes(self._options.extensions, candidate.offload),
        )
        schedule = timetable.schedule(candidate.microbatches, "step")
        if "I" in schedule.kinds and "I" not in self._compiled.schedule.kinds:
            raise InputError(
                f"schedule {schedule.name!r} has backwards in halves, and these stages have whole "
                'ones; name a schedule with whole backwards, such as "1f1b"'
            )
        call = self._at(self.samples(candidate.microbatches)) if sized else self._compiled
        return self.compiler.lowered(call.plan, schedule, "step", self._updates)

    def predict(self, candidate: Candidate) -> Predicted | None:
        """Predict a step of a candidate; None if these stages cannot run it."""
        samples, sizes = self.samples(candidate.microbatches), Sizes()
        serial = self._serial(candidate.microbatches)
        try:
            sized = bool(self._limited or self._links)
            program = self._lowered(candidate, sized=sized)
            if sized:
                sizes = self._held(samples)
        except FxpipeError:
            return None
        run = predict_step(
            self._compiled.plan,
            program,
            sizes,
            self._times(candidate.microbatches),
            links=self._links or (None if serial or not self._alone else Link(WAKE)),
            serial=serial,
            away=self._away,
        )
        if self._limited:
            peaks = tuple(float(memory.peak) for memory in run.memory)
        else:  # what it would keep is enough to compare equally fast ones
            peaks = tuple(float(kept * samples) for kept in run.device_kept)
        return Predicted(candidate, run.step_time, peaks)


def _of_size(call: Call, samples: int) -> Call:
    """The same call for micro-batches of another size, with zeros for data."""

    def change(leaf: Any, dim: int | None) -> Any:
        if dim is None or not isinstance(leaf, Tensor):
            return leaf
        return leaf.new_zeros((*leaf.shape[:dim], samples, *leaf.shape[dim + 1 :]))

    return replace(call, leaves=[*map(change, call.leaves, call.batch.dims)], size=samples)


def _of_operations(plan: Plan) -> dict[tuple[str, int], float]:
    """The times of each stage's operations, measured one by one."""
    return {key: time for key, time in measured_costs(plan).items() if key[0] not in BESIDE}


def offload_of(options: Options) -> Any:
    """The extension for offloading that a pipe was given, or None."""
    kind = find("extension", "offload") if there("extension", "offload") else ()
    return next((each for each in options.extensions if isinstance(each, kind)), None)


def with_modes(extensions: Sequence[Extension], modes: Modes) -> tuple[Extension, ...]:
    """The extensions of a pipe whose stages offload in these modes; unchanged if none does."""
    if not set(modes) - {"never"}:
        return tuple(extensions)
    kind = find("extension", "offload")
    return (*(each for each in extensions if not isinstance(each, kind)), kind(modes))
