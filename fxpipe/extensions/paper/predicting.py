"""Predict steps of a layout: candidates as in ``schedule="auto"``, over stages that are counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from fxpipe.errors import FxpipeError
from fxpipe.extend import find
from fxpipe.extensions.paper.counting import Half
from fxpipe.extensions.paper.device import Device
from fxpipe.extensions.paper.found import Sharded, sharding_by
from fxpipe.extensions.paper.layouts import Layout
from fxpipe.extensions.paper.profile import ModelParts, Profile
from fxpipe.extensions.planner.bounds import LeastMemory, least_seconds
from fxpipe.extensions.planner.candidates import EXACT, Candidate, Predicted
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
        sharding: what replicas share.
    """

    gradient: float | None
    state: float
    sharding: Sharded = "never"


@dataclass(frozen=True)
class CountedStages:
    """CountedStages of a layout, for one size of micro-batch.

    Attributes:
        begins: the submodule at which each begins.
        costs: of their tasks, in seconds.
        sizes: bytes.
        least: the same for lower bounds, with the shares of weights and gradients alone.
        edges: what goes further than to the next stage: name → stages.
    """

    begins: tuple[str, ...]
    costs: Mapping[Any, Cost]
    sizes: Sizes
    least: Sizes
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
        made: those that were made before.
    """

    def __init__(
        self,
        profile: Profile,
        layout: Layout,
        batch: int,
        hidden: float,
        holding: TrainingState,
        known: dict[Any, Simulation],
        made: dict[tuple[Recipe, int, int], Schedule],
    ) -> None:
        self._known, self._made = known, made
        self._profile, self.layout, self._hidden, self._holding = profile, layout, hidden, holding
        self.batch = batch // layout.replicas
        self._stages: dict[tuple[int, int], CountedStages] = {}
        self._bounds: dict[Any, LeastMemory] = {}
        self._least: dict[Any, float] = {}
        self._waits: dict[Candidate, Callable[[], dict[str, float]]] = {}

    @property
    def device(self) -> Device:
        return self.layout.cluster.device

    @property
    def sharding(self) -> Sharded:
        """What replicas share; with one nothing."""
        return self._holding.sharding if self.layout.replicas > 1 else "never"

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
        costs: dict[Any, Cost] = dict.fromkeys("ACGD", 0.0)
        link, holding = self.layout.group_link, self._holding
        rate = self.device.bandwidth * self.device.streaming
        each: dict[int, Sequence[int]] = {}  # stage → the bytes of each parameter
        elements: dict[int, Sequence[tuple[int, int]]] = {}  # the same of its gradient
        state, saved, deferred = dict[int, int](), dict[int, int](), dict[int, int]()
        shares: dict[int, float] = {}  # stage → the largest share that a replica has
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
            tensors = [tensor for part in own for tensor in part.tensors]
            each[s] = tuple(int(count * size) for count, size, _ in tensors)
            gradient = holding.gradient
            elements[s] = tuple(
                (int(trained * count * (size if gradient is None else gradient)), 1)
                for count, size, trained in tensors
            )
            shares[s] = self._share(each[s]) if self.sharding != "never" else 1.0
            whole = sum(count for count, _, _ in tensors) * shares[s]
            costs["U", s] = _UPDATE * whole / rate
            state[s] = int(holding.state * whole)
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
            parameters={s: sum(every) for s, every in each.items()},
            each=each,
            gradients={s: sum(size for size, _ in every) for s, every in elements.items()},
            elements=elements,
            optimizer=state,
            holds={s: frozenset(names) for s, names in incoming.items()},
            context=self.device.context,
        )
        least = sizes
        if self.sharding in ("zero2", "zero3"):
            least = replace(sizes, gradients=_part_of(sizes.gradients, shares))
        if self.sharding == "zero3":
            least = replace(least, parameters=_part_of(sizes.parameters, shares))
        names = tuple(parts.parts[at].name for at in begins)
        return CountedStages(names, costs | moved, sizes, least, edges)

    def _share(self, each: Sequence[int]) -> float:
        """The largest share of a stage's parameters that a replica has, which are dealt out."""
        loads = [0] * self.layout.replicas
        Parts.owners.find()(each, loads)
        return max(loads) / max(1, sum(loads))

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
        modes = candidate.recompute, candidate.offload
        way = candidate.recipe, self.samples(candidate.microbatches), schedule.microbatches
        if way not in self._bounds:
            plan = plan_for(schedule, skips=stages.edges)
            self._bounds[way] = LeastMemory(schedule, stages.least, plan)
        found = []
        for device in range(schedule.devices):
            held = schedule.held_by(device)
            key = way, device, *(tuple(x[s] for s in held) if x else () for x in modes)
            if key not in self._least:
                self._least[key] = self._bounds[way].of(device, *modes) + self.device.context
            found.append(self._least[key])
        return tuple(found)

    def _small(self, candidate: Candidate) -> Schedule:
        """The schedule of a candidate with few micro-batches."""
        return self._schedule(candidate, min(candidate.microbatches, 2 * self.layout.stages))

    def _schedule(self, candidate: Candidate, count: int) -> Schedule:
        way = candidate.recipe, self.layout.stages, count
        if way not in self._made:
            self._made[way] = candidate.recipe(self.layout.stages, count)
        return self._made[way]

    def predict(self, candidate: Candidate, worth: float) -> Predicted | None:
        """Predict a step of a candidate; None if there is no such schedule, or if it takes longer
        than ``worth`` seconds, whose memory takes as long to tell as the time."""
        count, devices = candidate.microbatches, self.layout.stages
        try:
            many = ceil(_ROUND / devices) * devices
            if count <= 4 * many:
                return self._predicted(candidate, [self._run(candidate, count)], [count], worth)
            first = 2 * many + count % many
            counts = [first, first + many]
            runs = [self._run(candidate, each) for each in counts]
        except FxpipeError:
            return None
        return self._predicted(candidate, runs, counts, worth)

    def _predicted(
        self,
        candidate: Candidate,
        runs: Sequence[Simulation],
        counts: Sequence[int],
        worth: float,
    ) -> Predicted | None:
        wanted = candidate.microbatches
        more = (wanted - counts[-1]) / (counts[-1] - counts[0]) if len(runs) > 1 else 0.0

        def whole(values: Sequence[float]) -> float:
            return values[-1] + more * (values[-1] - values[0])

        seconds = whole([run.step_time if run.steps == 1 else run.steady.period for run in runs])
        seconds = max(seconds, self.seconds(candidate))
        if seconds > EXACT * worth:
            return None
        first, last = runs[0], runs[-1]
        peaks = tuple(float(memory.peak) for memory in first.memory)
        if first.device_kept != last.device_kept:  # what it keeps grows with the micro-batches
            more_held = [float(memory.peak) for memory in last.memory]
            peaks = tuple(map(whole, zip(peaks, more_held, strict=True)))

        def waits() -> dict[str, float]:
            each = [_waits(run, candidate, self) for run in runs]
            return {name: whole([own[name] for own in each]) / seconds for name in each[0]}

        self._waits[candidate] = waits
        return Predicted(candidate, seconds, peaks)

    def waits(self, candidate: Candidate) -> dict[str, float]:
        """Cause → the share of a step that devices do not compute for it; empty if the candidate
        was not predicted."""
        return self._waits[candidate]() if candidate in self._waits else {}

    def _run(self, candidate: Candidate, count: int) -> Simulation:
        """Simulate a step of so many micro-batches of the candidate's size."""
        stages = self.stages(candidate.recipe, candidate.microbatches)
        replicas = self.layout.replicas
        key = (
            candidate.recipe,
            self.layout.stages,
            count,
            candidate.recompute,
            candidate.offload,
            replicas,
            self.sharding,
            tuple(stages.edges.items()),
        )
        links, sizes = self._links, stages.sizes
        if key in self._known:
            return self._known[key].with_costs(stages.costs, links=links, sizes=sizes)
        schedule = add_recompute(self._schedule(candidate, count), candidate.recompute)
        if set(candidate.offload) - {"never"}:
            schedule = find("extension", "offload")(candidate.offload).add_offload(schedule)
        shared = sharding_by(self.sharding)
        if self.sharding == "zero3":
            schedule = shared.add_shards(schedule)
        program = chain_program(schedule.verify(), replicas=replicas, skips=stages.edges)
        match self.sharding:
            case "zero1":
                program = Parts.gather_weights.find()(program)
            case "zero2":
                program = shared.keep(program, updates=True)
            case "zero3":
                program = shared.shard(program, updates=True)
        run = simulate(program, stages.costs, links=links, sizes=sizes)
        self._known[key] = run
        return run

    @cached_property
    def _links(self) -> dict[tuple[int, int], Link]:
        """The links; what replicas exchange goes round a ring."""
        replicas = self.layout.replicas
        links = dict(self.layout.links)
        for d in range(self.layout.stages) if replicas > 1 else ():
            links[d, d] = replace(links[d, d], latency=links[d, d].latency * (replicas - 1))
        return links

    def begins(self, candidate: Candidate) -> tuple[str, ...]:
        """The submodules at which the stages after the first begin."""
        return self.stages(candidate.recipe, candidate.microbatches).begins[1:]


def _part_of(whole: Mapping[int, int], shares: Mapping[int, float]) -> dict[int, int]:
    """Stage → the share of its bytes."""
    return {s: int(size * shares[s]) for s, size in whole.items()}


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
    updates = sum(x for (letter, _), times in tasks.items() if letter == "U" for x in times)
    after = run.makespan - run.through - updates / devices
    waiting = sum(each.total for each in idle) / devices
    copies = sum(sum(each.copying.values()) for each in idle) / devices
    summing = sum(each.summing for each in idle) / devices
    busiest = max(run.busy) - sum(run.busy) / devices
    return {
        "transfers": copies / steps,
        "sums over replicas": (summing + max(0.0, after)) / steps,
        "updates": updates / devices / steps,
        "tensor sums": sums / devices / steps,
        "recomputation": again / devices / steps,
        "uneven stages": min(busiest, max(0.0, waiting - copies - summing)) / steps,
        "idle devices": max(0.0, waiting - copies - summing - busiest) / steps,
    }
