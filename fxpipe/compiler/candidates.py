"""The candidates for a step over stages that are made: rehearsed if possible, and predicted."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import cast

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.compiler import Compiler, Rehearse
from fxpipe.compiler.overheads import away_rates, overheads
from fxpipe.compiler.predict import given_links, predict, predicted_peaks, step_sizes
from fxpipe.errors import FxpipeError, InputError, PartitionError
from fxpipe.ir.plan import Plan, StageCosts
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import Recipe, find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import BESIDE, Task
from fxpipe.passes.schedule import modes_of
from fxpipe.planner.candidates import (
    EXACT,
    Affine,
    Candidate,
    Modes,
    Predicted,
    best_of,
    evaluate,
    least_seconds,
    library_over,
    microbatch_counts,
)
from fxpipe.search.search import search_schedule
from fxpipe.simulator.costs import Overheads, Rehearsal, measured_costs
from fxpipe.simulator.sizes import Sizes

SECONDS, SHORT = 10.0, 1.0
"""How long a schedule is searched for at most, by itself and beside those of the library."""

_ROUNDS = 4
"""How often, at most, with less memory each time, until the whole program fits."""

FAMILIES = (("zb-h1", "1f1b"), ("v-half",), ("interleaved-1f1b",))
"""Where the stages may be: one on each device, or two. The stages are made for the first schedule,
which keeps few micro-batches, and what is rehearsed are these, with backwards in halves or whole,
for the three smallest numbers of micro-batches."""


class Stages:
    """The stages that a model was cut into, as candidates use them.

    Attributes:
        compiler: has the options, and lowers.
        rehearsed: whether steps over them were rehearsed, or cannot be.
    """

    rehearsed = False

    def __init__(
        self,
        compiler: Compiler,
        limits: Sequence[float],
        compiled: Compiled,
        size: int,
        updates: bool,
        measured: int | None = None,
    ) -> None:
        """Nothing is predicted yet.

        Args:
            limits: device → the bytes that it may hold.
            compiled: a step of these stages.
            size: the samples of a batch.
            measured: those of a micro-batch of which its operations have the times; by default its.
        """
        self.compiler, self._compiled, self._updates = compiler, compiled, updates
        self._home = compiled.schedule.placement
        self._size, self._options = size, compiler.options
        self._graph = compiler.plans.graph_of(compiled.traced)
        self._limits, self._links = limits, given_links(compiler.options)
        self._limited = any(limit < math.inf for limit in self._limits)
        group = compiler.options.group  # on ranks the first's rates, so that all choose alike
        rates = partial(away_rates, compiler.options.here.type)
        self._away = group.share("how fast tensors are stored", rates) if group.size > 1 else None
        self._calls: dict[int, Compiled] = {}
        self._sizes: dict[int, Sizes] = {}
        # kind of backward → samples of a micro-batch → what a step taught
        self._taught: dict[str, dict[int, Rehearsal]] = {}
        self._ran: set[tuple[str, int]] = set()  # which of these were rehearsed over these stages
        self._measured = {measured or compiled.samples: self._of_operations(compiled.plan)}

    def _of_operations(self, plan: Plan) -> Rehearsal:
        """The times of the operations of each stage, as they were measured one by one, with what
        comes to that. That of several processes would have to be the same in all, and streams hide
        theirs."""
        here = self._options.group.size == 1 and not self._options.places
        besides = overheads() if here else Overheads()
        known = measured_costs(plan).items()
        costs = {key: besides.task + time for key, time in known if key[0] not in BESIDE}
        return Rehearsal(costs, besides, serial=here and self._compiled.threads == 1)

    def learn(self, rehearse: Rehearse, like: Stages | None = None) -> None:
        """Take the times of steps as they run, for a few sizes of micro-batches, or those that
        other stages have taught; where that is not possible, measure the operations for a further
        size."""
        self.rehearsed = True
        if like is not None and like._taught:
            self._learn_from(like)
            return
        counts, modes = [len(self._compiled.kernels)], self._modes
        devices = len(self._limits)
        chooses = self._options.decides == "auto"
        if chooses and self._limited and self._options.recompute == "never":
            modes = modes_of("always", len(modes))
        if chooses and self._options.microbatches is None:
            counts = microbatch_counts(self._size, devices)[:3]
        families = {find_recipe(own[0]).place(devices): own for own in reversed(FAMILIES)}
        for count, name in product(counts, reversed(families[self._home])):
            self.rehearse(rehearse, Candidate(find_recipe(name), count, modes))
        own = self._compiled.samples
        other = own // 4 if own >= 8 else min(4 * own, self._size)
        if chooses and len(counts) > 1 and not self._taught and other != own:
            with suppress(FxpipeError):
                at_other = self.compiler.plans.costs_at(self._graph, other)
                stages = [replace(s, costs=at_other[s.index]) for s in self._compiled.plan.stages]
                plan = replace(self._compiled.plan, stages=tuple(stages))
                self._measured[other] = self._of_operations(plan)

    def rehearse(self, rehearse: Rehearse, candidate: Candidate) -> None:
        """Take the times of steps of this candidate, if it is predicted to fit."""
        predicted, samples = self.predict(candidate), self._samples(candidate.microbatches)
        if predicted is None or not predicted.fits(self._limits):
            return
        with suppress(FxpipeError):  # it takes micro-batches of one size alone
            schedule, program = self._lowered(candidate, sized=True)
            call = replace(self._at(samples), schedule=schedule, program=program)
            made = rehearse(call, self._graph.call)
            if made is not None:
                kind = "I" if "I" in schedule.kinds else "B"
                self._taught.setdefault(kind, {})[samples] = made
                self._ran.add((kind, samples))

    def _learn_from(self, other: Stages) -> None:
        """Take the times of the whole model that other stages of it have taught, until these are
        rehearsed themselves: each stage gets its share by its operations."""
        own = self._measured[self._compiled.samples]
        weights = self._held(self._compiled.samples).gradients
        shares = {**own.costs} | {("U", s): float(size) for s, size in weights.items()}
        for kind, known in other._taught.items():
            for samples, ran in known.items():
                costs: dict[tuple[str, int], float] = {}
                for letter in {letter for letter, _ in ran.costs}:
                    each = overheads().task if letter != "U" else 0.0
                    stages = [s for x, s in ran.costs if x == letter]
                    whole = sum(max(ran.costs[letter, s] - each, 0.0) for s in stages)
                    total = sum(shares.get((letter, s), 0.0) for s in range(len(self._home)))
                    for s in range(len(self._home)):
                        part = shares.get((letter, s), 0.0) / (total or 1.0)
                        costs[letter, s] = each + whole * part
                self._taught.setdefault(kind, {})[samples] = replace(ran, costs=costs)

    @property
    def _modes(self) -> Modes:
        return modes_of(self._options.recompute, len(self._home))

    def fastest(self) -> Predicted:
        """The best of the library's schedules, numbers of micro-batches and recomputations."""
        options, devices = self._options, len(self._limits)
        counts = [options.microbatches] if options.microbatches else None
        ways = [
            (recipe, count)
            for recipe in library_over(devices, lambda _: self._home)
            for count in counts or microbatch_counts(self._size, devices)
        ]
        free = options.recompute == "never"
        stored = modes_of(options.offload, len(self._home))
        chosen = free and options.offload == "never" and not options.cuda_graphs
        found = evaluate(
            ways,
            None if free else self._modes,
            self._limits,
            self._least,
            self.predict,
            offload=None if chosen else stored,
        )
        if not found:
            raise InputError("no schedule of the library can run these stages; name one yourself")
        return best_of([each for each in found if each.fits(self._limits)] or found[:1])

    def confirmed(self, found: Predicted, rehearse: Rehearse) -> Predicted:
        """The best candidate with times that were rehearsed over these stages, or the same with a
        schedule that is searched for, if that is faster."""
        choice = found.candidate
        if self._taught and not self._ran:
            self.rehearse(rehearse, choice)
            found = self.predict(choice) or found
        least = self._least(choice.recipe, choice.microbatches)
        if not found.fits(self._limits) or found.seconds <= EXACT * least:
            return found
        with suppress(FxpipeError):
            made = self.searched(choice, SHORT)
            if made.fits(self._limits) and made.seconds * EXACT < found.seconds:
                return made
        return found

    def may_be_beaten(self, seconds: float) -> bool:
        """Whether other stages of the model could take less, if their devices were never idle."""
        devices, count = len(self._limits), self._options.microbatches
        floors = []
        for each in [count] if count else microbatch_counts(self._size, devices):
            known = self._known(self._samples(each), "FB")
            work = sum(t for (letter, _), t in known.costs.items() if letter in "FB")
            floors.append(each * work / (1 if known.serial else devices) + known.overheads.step)
        return seconds > EXACT * min(floors)

    def searched(
        self, candidate: Candidate | None = None, seconds: float | None = None
    ) -> Predicted:
        """The best schedule that a search finds, with the micro-batches and the recomputation that
        are given, or those of a candidate."""
        count, memory = len(self._compiled.kernels), self._limits
        given = candidate or Candidate(find_recipe("1f1b"), count, self._modes)
        for _ in range(_ROUNDS):
            recipe = _as_recipe(self._search(given, memory, seconds or SECONDS))
            made = self.predict(replace(given, recipe=recipe))
            if made is None:
                raise InputError("these stages cannot run in halves; name a schedule yourself")
            found = made
            over = found.over(self._limits)
            if not any(over) or candidate is not None:
                break
            memory = tuple(most - more for most, more in zip(memory, over, strict=True))
        return found

    def _search(self, given: Candidate, memory: Sequence[float], seconds: float) -> Schedule:
        """A schedule for the stages' times and bytes, each stage handing one value to the next."""
        count, halves = given.microbatches, "I" in self._compiled.schedule.kinds
        times, sizes = dict(self._known(self._samples(count), "I" if halves else "B").known), None
        again = [stage for stage, mode in enumerate(given.recompute) if mode != "never"]
        times |= {(x, s): times[x, s] + times["R", s] for x in "BI" for s in again}
        if self._limited:
            samples = self._samples(count)
            sizes = _of_a_chain(self._at(samples).plan, self._held(samples), again)

        def search() -> tuple[str, str]:
            try:
                found = search_schedule(
                    times,
                    count,
                    placement=self._home,
                    whole=None if halves else True,
                    memory=memory if sizes else None,
                    sizes=sizes,
                    delay=cast(int, self._options.recipe.delay),
                    seconds=seconds,
                )
            except InputError as error:  # of the memory; all ranks are to know it
                return "", str(error)
            return str(found.schedule), ""

        text, why = self._options.group.share("the schedule", search)
        if why:
            raise PartitionError(f'{why}; schedule="auto" chooses recomputation and micro-batches')
        return Schedule.parse(text)

    def _samples(self, count: int) -> int:
        """Those of a micro-batch, where the batch is split into so many."""
        return -(-self._size // count)

    def _known(self, samples: int, kinds: Collection[str]) -> Rehearsal:
        """The times in micro-batches of so many samples, where a schedule has these tasks. They lie
        on lines between the sizes that are known; what comes to tasks is that of the nearest."""
        first, second = ("B", "I") if "I" in kinds else ("I", "B")
        found = self._measured
        costs: dict[tuple[str, int], float] = {}
        for known in (self._measured, self._taught.get(first), self._taught.get(second)):
            if known:
                found, sizes = known, {at: each.known for at, each in known.items()}
                common = set.intersection(*map(set, sizes.values()))
                costs |= {
                    key: Affine({at: own[key] for at, own in sizes.items()})(samples)
                    for key in common
                }
        nearest = min(found, key=lambda at: abs(math.log(at / samples)))
        return replace(found[nearest], costs=costs)

    def costs(self, count: int) -> Mapping[int, StageCosts]:
        """Stage → what it costs, where the batch is split into so many micro-batches."""
        times = self._known(self._samples(count), "I").costs
        return {s: StageCosts(*(times[x, s] for x in "FBIW")) for s in range(len(self._home))}

    def _least(self, recipe: Recipe, count: int) -> float:
        devices = len(self._limits)
        known = self._known(self._samples(count), recipe(devices, count).kinds)
        least = least_seconds(known.costs, recipe, count, devices)
        if known.serial:  # one thread does the work of all
            least = count * sum(t for (letter, _), t in known.costs.items() if letter in "FB")
        return least + known.overheads.step

    def _at(self, samples: int) -> Compiled:
        """The same stages for micro-batches of that size."""
        if samples not in self._calls:
            self._calls[samples] = self.compiler.resized(
                self._compiled, self._graph, samples, self._updates
            )
        return self._calls[samples]

    def _held(self, samples: int) -> Sizes:
        """What these hold."""
        if samples not in self._sizes:
            own = self._at(samples)
            self._sizes[samples] = step_sizes(own, self.compiler.options, self._updates)
        return self._sizes[samples]

    def peaks(self, candidate: Candidate) -> tuple[float, ...]:
        """Device → the most bytes that it is predicted to hold."""
        _, program = self._lowered(candidate, sized=True)
        samples = self._samples(candidate.microbatches)
        plan = self._at(samples).plan
        return tuple(map(float, predicted_peaks(plan, program, self._held(samples))))

    def _lowered(self, candidate: Candidate, *, sized: bool) -> tuple[Schedule, Program]:
        """The schedule and the program of a candidate; ``sized``, by the graph for its size of
        micro-batches. Raises FxpipeError where these stages cannot run it."""
        timetable = self.compiler.timetable.changed(
            recipe=candidate.recipe,
            recompute=candidate.recompute,
            offload=candidate.offload or self._options.offload,
        )
        schedule = timetable.schedule(candidate.microbatches, "step")
        leaves = self._compiled.traced.leaves
        if "I" in schedule.kinds and ("I" not in self._compiled.schedule.kinds or leaves):
            raise InputError(
                f"schedule {schedule.name!r} has backwards in halves, in which these stages are "
                'not measured; name one that has whole ones, such as "1f1b"'
            )
        made = self._at(self._samples(candidate.microbatches)) if sized else self._compiled
        return schedule, self.compiler.lowered(made.plan, schedule, "step", self._updates)

    def predict(self, candidate: Candidate) -> Predicted | None:
        """What a step is predicted to need; None where these stages cannot run it."""
        samples, sizes = self._samples(candidate.microbatches), Sizes()
        try:
            sized = bool(self._limited or self._links)
            schedule, program = self._lowered(candidate, sized=sized)
            if sized:
                sizes = self._held(samples)
        except FxpipeError:
            return None
        plan, known = self._compiled.plan, self._known(samples, schedule.kinds)
        found = predict(plan, program, sizes, rehearsal=known, links=self._links, away=self._away)

        def held() -> tuple[float, ...]:
            if self._limited:
                return tuple(float(memory.peak) for memory in found.memory)
            return tuple(float(stash * samples) for stash in found.device_stash)

        return Predicted(candidate, found.step_time, held, found.bubble)


def _as_recipe(schedule: Schedule) -> Recipe:
    """A schedule that was found, as a recipe; fewer micro-batches leave out the last ones."""

    def tasks(device: int, devices: int, microbatches: int) -> list[Task]:
        return [t for t in schedule.rows[device] if (t.microbatch or 0) < microbatches]

    return Recipe("search", tasks, schedule.delay, lambda devices: schedule.placement)


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
