"""Predict steps of a layout: candidates as in ``schedule="auto"``, over stages that are counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from fxpipe.errors import FxpipeError
from fxpipe.extend import find
from fxpipe.extensions.paper.counting import Half
from fxpipe.extensions.paper.device import Device
from fxpipe.extensions.paper.layouts import Layout
from fxpipe.extensions.paper.profile import ModelParts, Profile
from fxpipe.extensions.planner.bounds import LeastMemory, least_seconds
from fxpipe.extensions.planner.candidates import Candidate, Predicted
from fxpipe.extensions.simulator.chain import chain_program, plan_for
from fxpipe.extensions.simulator.costs import Cost, Link, Time, seconds_of
from fxpipe.extensions.simulator.simulate import simulate
from fxpipe.extensions.simulator.simulation import Simulation
from fxpipe.extensions.simulator.sizes import Sizes
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.parts import Parts
from fxpipe.passes.schedule import add_recompute

_ROUND = 8
"""The least number of micro-batches of a round. Steps of up to four rounds are simulated as a
whole. Of longer ones those of about two and of three rounds are: their difference is that of each
further round."""

_UPDATE = 28
"""Bytes that an update reads and writes for each parameter: with Adam in 32 bits it reads gradient,
weight and two states, and writes the last three."""


@dataclass(frozen=True)
class TrainingState:
    """What training holds for each parameter.

    Attributes:
        gradient: bytes of a sum of gradients, for each element; None for those of the parameter.
        state: bytes of the optimizer's state for each element.
        sharded: whether replicas share the state.
    """

    gradient: float | None
    state: float
    sharded: bool


@dataclass(frozen=True)
class CountedStages:
    """CountedStages of a layout, for one size of micro-batch.

    Attributes:
        begins: the submodule at which each begins.
        costs: of their tasks, in seconds.
        sizes: bytes.
        edges: what goes further than to the next stage: name → stages.
    """

    begins: tuple[str, ...]
    costs: Mapping[Any, Cost]
    sizes: Sizes
    edges: Mapping[str, tuple[int, int]]


class Predictor:
    """Predicts the steps of a layout.

    Args:
        profile: the model.
        layout: the devices.
        batch: the samples of a batch.
        hidden: the share of the sums of tensor parallelism that hides.
        holding: what training holds.
        known: schedules that were simulated before, for any layout.
    """

    def __init__(
        self,
        profile: Profile,
        layout: Layout,
        batch: int,
        hidden: float,
        holding: TrainingState,
        known: dict[Any, Simulation],
    ) -> None:
        self._known = known
        self._profile, self.layout, self._hidden, self._holding = profile, layout, hidden, holding
        self.batch = batch // layout.replicas
        self._stages: dict[tuple[int, int], CountedStages] = {}
        self._made: dict[tuple[Recipe, int], Schedule] = {}
        self._least: dict[Any, tuple[float, ...]] = {}
        self.waits: dict[Candidate, dict[str, float]] = {}

    @property
    def device(self) -> Device:
        return self.layout.cluster.device

    def parts(self, count: int) -> ModelParts:
        """The model's parts, if a batch is split into ``count`` micro-batches."""
        return self._profile.parts(self.samples(count), self.layout.group, self.device)

    def samples(self, count: int) -> int:
        """The samples of a micro-batch."""
        return ceil(self.batch / count)

    def exchanging(self, count: int) -> float:
        """The seconds in which devices sum gradients and hand on values, if nothing hides."""
        parts, stages, replicas = self.parts(count), self.layout.stages, self.layout.replicas
        trained = sum(part.trained for part in parts.parts) / stages
        crossing = max((each.bytes for each in parts.crossings), default=0.0) / self.layout.group
        links = self.layout.links
        summed = links[0, 0].seconds(2 * trained) if replicas > 1 else 0.0
        ways = [links[s, s + 1].seconds(crossing) for s in range(stages - 1)]
        return summed + 2 * count * max(ways, default=0.0)

    def stages(self, recipe: Recipe, count: int) -> CountedStages:
        """The stages for a schedule. Raises InputError if the model has too few parts."""
        many = recipe.stages(self.layout.stages)
        key = many, self.samples(count)
        if key not in self._stages:
            self._stages[key] = self._cut(self.parts(count), many)
        return self._stages[key]

    def _cut(self, parts: ModelParts, many: int) -> CountedStages:
        begins = parts.cut(many)
        ends = [*begins[1:], len(parts.parts)]
        of_part = [
            s for s, (a, b) in enumerate(zip(begins, ends, strict=True)) for _ in range(a, b)
        ]
        costs: dict[Any, Cost] = {"A": 0.0, "C": 0.0}
        link, dp, holding = self.layout.group_link, self.layout.replicas, self._holding
        rate = self.device.bandwidth * self.device.streaming
        parameters, gradients, state = (dict.fromkeys(range(many), 0) for _ in range(3))
        saved, deferred = (dict.fromkeys(range(many), 0) for _ in range(2))
        for s, (a, b) in enumerate(zip(begins, ends, strict=True)):
            own = parts.parts[a:b]
            halves: dict[Half, Time] = {}
            for half in ("F", "I", "W"):
                seconds = sum(part.seconds[half] for part in own)
                size = sum(part.sums.get(half, (0.0, 0))[0] for part in own)
                times = sum(part.sums.get(half, (0.0, 0))[1] for part in own)
                halves[half] = Time(seconds, size, link, self._hidden, times)
            back = halves["I"]
            costs["F", s] = costs["R", s] = halves["F"]
            costs["I", s], costs["W", s] = back, halves["W"]
            costs["B", s] = replace(back, compute=back.compute + halves["W"].compute)
            trained = sum(part.trained for part in own)
            elements = sum(part.elements for part in own)
            share = dp if holding.sharded else 1
            costs["U", s] = _UPDATE * elements / share / rate
            parameters[s] = int(sum(part.parameters for part in own))
            sums = trained if holding.gradient is None else holding.gradient * elements
            gradients[s], state[s] = int(sums), int(holding.state * elements / share)
            saved[s] = int(sum(part.saved for part in own))
            deferred[s] = int(sum(part.deferred for part in own))
        values, edges = self._crossing(parts, of_part, many)
        moved = self._away(saved)
        incoming = {s: {f"y{s - 1}"} for s in range(1, many)}
        for name, (_, target) in edges.items():
            incoming[target].add(name)
        sizes = Sizes(
            values,
            saved,
            deferred,
            parameters=parameters,
            gradients=gradients,
            optimizer=state,
            holds={s: frozenset(names) for s, names in incoming.items()},
            context=self.device.context,
        )
        names = tuple(parts.parts[at].name for at in begins)
        return CountedStages(names, costs | moved, sizes, edges)

    def _away(self, saved: Mapping[int, int]) -> dict[Any, Cost]:
        seconds = {s: size / self.device.host for s, size in saved.items()}
        return {(way, s): time for way in "OP" for s, time in seconds.items()}

    def _crossing(
        self, parts: ModelParts, of_part: Sequence[int], many: int
    ) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
        """The bytes of values, and the edges beyond those to the next stage."""
        between: defaultdict[tuple[int, int], float] = defaultdict(float)
        for crossing in parts.crossings:
            source = of_part[crossing.source]
            for target in {of_part[at] for at in crossing.targets} - {source}:
                # each device of a group sends its part
                between[source, target] += crossing.bytes / self.layout.group
        values = {f"y{s}": ceil(between.pop((s, s + 1), 0.0)) for s in range(many)}
        edges = {f"skip{a}-{b}": (a, b) for a, b in between}
        return values | {f"skip{a}-{b}": ceil(x) for (a, b), x in between.items()}, edges

    def seconds(self, candidate: Candidate) -> float:
        """A lower bound for the seconds of a step. Raises InputError if there is no schedule."""
        stages = self.stages(candidate.recipe, candidate.microbatches)
        times = {k: t for k, t in seconds_of(stages.costs).items() if isinstance(k, tuple)}
        schedule = replace(self._small(candidate), microbatches=candidate.microbatches)
        return least_seconds(times, schedule, candidate.recompute)  # type: ignore[arg-type]

    def peaks(self, candidate: Candidate) -> tuple[float, ...]:
        """Lower bounds for the bytes of the devices."""
        stages, schedule = (
            self.stages(candidate.recipe, candidate.microbatches),
            self._small(candidate),
        )
        key = (
            candidate.recipe,
            self.samples(candidate.microbatches),
            candidate.recompute,
            candidate.offload,
            schedule.microbatches,
        )
        if key not in self._least:
            least = LeastMemory(schedule, stages.sizes, plan_for(schedule, skips=stages.edges))
            self._least[key] = tuple(
                least.of(device, candidate.recompute, candidate.offload) + self.device.context
                for device in range(schedule.devices)
            )
        return self._least[key]

    def _small(self, candidate: Candidate) -> Schedule:
        """The schedule of a candidate with few micro-batches."""
        return self._schedule(candidate, min(candidate.microbatches, 2 * self.layout.stages))

    def _schedule(self, candidate: Candidate, count: int) -> Schedule:
        way = candidate.recipe, count
        if way not in self._made:
            self._made[way] = candidate.recipe(self.layout.stages, count)
        return self._made[way]

    def predict(self, candidate: Candidate) -> Predicted | None:
        """Predict a step of a candidate; None if there is no such schedule."""
        count, devices = candidate.microbatches, self.layout.stages
        try:
            many = ceil(_ROUND / devices) * devices
            if count <= 4 * many:
                return self._predicted(candidate, [self._run(candidate, count)], [count])
            first = 2 * many + count % many
            counts = [first, first + many]
            runs = [self._run(candidate, each) for each in counts]
        except FxpipeError:
            return None
        return self._predicted(candidate, runs, counts)

    def _predicted(
        self, candidate: Candidate, runs: Sequence[Simulation], counts: Sequence[int]
    ) -> Predicted:
        wanted = candidate.microbatches
        more = (wanted - counts[-1]) / (counts[-1] - counts[0]) if len(runs) > 1 else 0.0

        def whole(values: Sequence[float]) -> float:
            return values[-1] + more * (values[-1] - values[0])

        seconds = whole([run.step_time if run.steps == 1 else run.steady.period for run in runs])
        seconds = max(seconds, self.seconds(candidate))
        first, last = runs[0], runs[-1]
        peaks = tuple(float(memory.peak) for memory in first.memory)
        if first.device_kept != last.device_kept:  # what it keeps grows with the micro-batches
            more_held = [float(memory.peak) for memory in last.memory]
            peaks = tuple(map(whole, zip(peaks, more_held, strict=True)))
        waits = [_waits(run, candidate, self) for run in runs]
        parts = {name: whole([each[name] for each in waits]) for name in waits[0]}
        self.waits[candidate] = {name: part / seconds for name, part in parts.items()}
        return Predicted(candidate, seconds, peaks)

    def _run(self, candidate: Candidate, count: int) -> Simulation:
        """Simulate a step of so many micro-batches of the candidate's size."""
        stages = self.stages(candidate.recipe, candidate.microbatches)
        summed = self.layout.replicas > 1
        key = (
            candidate.recipe,
            self.layout.stages,
            count,
            candidate.recompute,
            candidate.offload,
            summed,
            tuple(stages.edges.items()),
        )
        links, sizes = self._links, stages.sizes
        if key in self._known:
            return self._known[key].with_costs(stages.costs, links=links, sizes=sizes)
        schedule = add_recompute(self._schedule(candidate, count), candidate.recompute)
        if set(candidate.offload) - {"never"}:
            schedule = find("extension", "offload")(candidate.offload).add_offload(schedule)
        schedule.verify()
        program = chain_program(schedule, replicas=1 + summed, skips=stages.edges)
        if summed and self._holding.sharded:
            program = Parts.gather_weights.find()(program)
        run = simulate(program, stages.costs, links=links, sizes=sizes)
        self._known[key] = run
        return run

    @cached_property
    def _links(self) -> dict[tuple[int, int], Link]:
        """The links, as two replicas would need them to sum as fast as all do."""
        replicas = self.layout.replicas
        links = dict(self.layout.links)
        for d in range(self.layout.stages) if replicas > 1 else ():
            link, share = links[d, d], 2 * (replicas - 1) / replicas
            links[d, d] = Link(link.latency * (replicas - 1), link.bandwidth / share)
        return links

    def begins(self, candidate: Candidate) -> tuple[str, ...]:
        """The submodules at which the stages after the first begin."""
        return self.stages(candidate.recipe, candidate.microbatches).begins[1:]


def _waits(run: Simulation, candidate: Candidate, of: Predictor) -> dict[str, float]:
    """Cause → the seconds of a step that a device does not compute for it, in the mean."""
    devices, steps = run.devices, run.steps
    stages = of.stages(candidate.recipe, candidate.microbatches)
    shown = {
        key: cost.total - cost.compute
        for key, cost in stages.costs.items()
        if isinstance(cost, Time)
    }
    tasks = run.tasks
    sums = sum(shown.get(key, 0.0) * len(times) for key, times in tasks.items())
    again = sum(sum(times) for (letter, _), times in tasks.items() if letter == "R")
    again -= sum(shown.get(k, 0.0) * len(times) for k, times in tasks.items() if k[0] == "R")
    idle = run.idle
    update = run.makespan - run.through
    waiting = sum(each.total for each in idle) / devices
    copies = sum(sum(each.copying.values()) for each in idle) / devices
    summing = sum(each.summing for each in idle) / devices
    busiest = max(run.busy) - sum(run.busy) / devices
    return {
        "transfers": copies / steps,
        "sums over replicas": (summing + update) / steps,
        "tensor sums": sums / devices / steps,
        "recomputation": again / devices / steps,
        "uneven stages": min(busiest, max(0.0, waiting - copies - summing)) / steps,
        "idle devices": max(0.0, waiting - copies - summing - busiest) / steps,
    }
