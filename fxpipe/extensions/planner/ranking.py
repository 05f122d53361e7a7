"""Rank the ways to train a measured model, by simulation; see ``plan_training``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from math import ceil, inf

from fxpipe.errors import FxpipeError, InputError
from fxpipe.extensions.planner import offloading
from fxpipe.extensions.planner.candidates import (
    Candidate,
    Modes,
    Predicted,
    best_of,
    evaluate,
    least_seconds,
    library_over,
    microbatch_counts,
)
from fxpipe.extensions.planner.choices import Choice, TrainingPlan, ranked
from fxpipe.extensions.planner.cluster import Cluster, Layout
from fxpipe.extensions.planner.profile import Cut, Profile
from fxpipe.extensions.simulator.simulate import simulate_schedule
from fxpipe.extensions.simulator.simulation import Simulation
from fxpipe.ir.recipe import Recipe
from fxpipe.passes.schedule import add_recompute, modes_of

Peaks = Callable[[Cut, int, Candidate], tuple[float, ...]]
"""(cut, replicas, candidate) → device → the most bytes that it holds; raises FxpipeError if the
candidate cannot run."""


class _Exact:
    """The exact bytes that devices hold, counted once for each candidate that is asked for.

    Attributes:
        known: (stages, replicas, candidate) → device → bytes; infinite if it cannot run.
        why: the error of the last candidate that could not run.
    """

    def __init__(self, peaks: Peaks) -> None:
        self.known: dict[tuple[int, int, Candidate], tuple[float, ...]] = {}
        self.why: FxpipeError | None = None
        self._peaks = peaks

    def __call__(self, cut: Cut, replicas: int, candidate: Candidate) -> tuple[float, ...]:
        key = cut.count, replicas, candidate
        if key not in self.known:
            try:
                self.known[key] = self._peaks(cut, replicas, candidate)
            except FxpipeError as error:
                self.known[key], self.why = (inf,) * cut.count, error
        return self.known[key]

    def over(self, memory: float) -> int:
        """How many candidates are known not to fit."""
        fullest = map(max, self.known.values())
        return sum(peak > memory or peak == inf for peak in fullest)


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
        peaks: counts exactly what devices hold; by default it is estimated from the atoms. While
            the estimate is far below the memory, only the returned choices are counted exactly.
    """
    exact = None if peaks is None else _Exact(peaks)
    stages: dict[int, Cut | None] = {}
    layouts = [layout for layout in cluster.layouts() if batch % layout.replicas == 0]

    def best_of_layouts() -> Iterator[Choice]:
        """Yield the best choices of each layout, except those slower than ``keep`` earlier ones."""
        fast: list[float] = []
        for layout in sorted(layouts, key=lambda layout: layout.stages):
            count = layout.stages
            if count not in stages:
                stages[count] = profile.cut(count, cluster.speed)
            if (cut := stages[count]) is None:
                continue
            limits = (cluster.memory,) * count
            predictor = _Predictor(cut, layout, batch // layout.replicas, exact)
            named = library_over(count, stale=stale, halves=halves) if recipes is None else recipes
            stores = recompute and offload and profile.away and offloading.possible()
            predicted = evaluate(
                product(named, microbatch_counts(predictor.batch, count)),
                None if recompute else modes_of("never", count),
                limits,
                predictor.least,
                predictor.predict,
                keep=2,
                offload=None if stores else (),
                worth=sorted(fast)[keep - 1] if len(fast) >= keep else inf,
            )
            for chosen in _best_of_each(predicted):
                samples = ceil(predictor.batch / chosen.candidate.microbatches)
                fits = chosen.fits(limits)
                fast += [chosen.seconds] if fits else []
                limit = predictor.limit(chosen) if fits else "memory"
                yield Choice(layout, cut, chosen, samples, batch, limit)

    while True:
        if not (every := list(best_of_layouts())):
            raise InputError(
                f"a batch of {batch} cannot be divided among {cluster.devices} devices, or the "
                "model has fewer operations than there are stages; give another batch or fewer "
                "devices"
            )
        known = 0 if exact is None else exact.over(cluster.memory)
        plan = ranked(every, cluster, keep)
        if exact is None or exact.over(cluster.memory) == known:
            break  # else choices that seemed to fit do not: rank again with the exact bytes
    if not plan.choices and exact is not None and exact.why is not None:
        raise exact.why
    return plan


def _best_of_each(predicted: Sequence[Predicted]) -> Iterator[Predicted]:
    """The best schedule for each number of micro-batches, recomputation and offloading: of equally
    fast ones the one that holds the least."""
    alike: dict[tuple[int, Modes, Modes], list[Predicted]] = {}
    for each in predicted:
        key = each.candidate.microbatches, each.candidate.recompute, each.candidate.offload
        alike.setdefault(key, []).append(each)
    return map(best_of, alike.values())


class _Predictor:
    """Simulates candidates for the stages of a layout."""

    def __init__(self, stages: Cut, layout: Layout, batch: int, exact: _Exact | None) -> None:
        self.batch, self._exact = batch, exact
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
            schedule = offloading.offloading(schedule, candidate.offload)
            run = simulate_schedule(
                schedule,
                self._stages.times(samples),
                links=layout.links,
                sizes=self._stages.sizes(samples),
                replicas=layout.replicas,
            )
        except FxpipeError:  # no schedule of so many devices and micro-batches
            return None
        seconds, idle = run.makespan, run.bubble
        if run.steps > 1:  # batches overlap
            seconds, idle = run.steady.period, abs(run.steady.bubble)
        self._simulations[candidate] = run
        roughly = tuple(float(memory.peak) for memory in run.memory)
        if self._exact is None:
            return Predicted(candidate, seconds, roughly, idle)
        key = layout.stages, layout.replicas, candidate
        if key in self._exact.known:
            return Predicted(candidate, seconds, self._exact.known[key], idle)
        held = partial(self._exact, self._stages, layout.replicas, candidate)
        return Predicted(candidate, seconds, held, idle, roughly)

    def limit(self, predicted: Predicted) -> str:
        """The largest part of a step besides computing, as a key of ``HELP``."""
        candidate = predicted.candidate
        run, stages = self._simulations[candidate], range(self._layout.stages)
        count = candidate.microbatches
        times = self._stages.times(self._samples(count))
        work = [count * (times["F", s] + times["B", s]) for s in stages]
        mean = sum(work) / len(work)
        idles = run.idle
        again = [s for s, mode in enumerate(candidate.recompute) if mode != "never"]
        # copying[d] on device d itself is the time of offloading
        stored = sum(idle.copying.get(d, 0.0) for d, idle in enumerate(idles)) / len(idles)
        parts = {
            "the slowest stage": max(work) - mean,
            "transfers": sum(sum(idle.copying.values()) for idle in idles) / len(idles) - stored,
            "offloading": stored,
            "sums over replicas": max(
                max(idle.summing for idle in idles),
                run.makespan - run.through - max(times["U", s] for s in stages)
                if self._layout.replicas > 1
                else 0.0,
            ),
            "recomputation": sum(count * times["F", s] for s in again) / len(work),
        }
        parts["idle devices"] = max(0.0, predicted.idle * predicted.seconds - sum(parts.values()))
        worst = max(parts, key=parts.__getitem__)
        return worst if parts[worst] > _SMALL * predicted.seconds else "computing"


_SMALL = 0.05
"""Parts below this share of the step do not limit it."""
