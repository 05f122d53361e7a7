"""What is recomputed, stored and known of the steps that may be taken."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fxpipe.extensions.offload.add_offload import add_offload
from fxpipe.extensions.planner.bounds import ALWAYS, NEVER, Modes, least_seconds
from fxpipe.extensions.planner.candidates import (
    Candidate,
    Predicted,
    evaluate,
    interpolated,
    library_over,
    microbatch_counts,
)
from fxpipe.extensions.simulator import Sizes, simulate_schedule
from fxpipe.extensions.simulator.costs import (
    Key,
    times_of,
)
from fxpipe.ir.recipe import Placement, find_recipe, one_each, round_robin, vee
from fxpipe.passes.schedule import add_recompute
from tests.helpers.profiles import some


class Nothing:
    """Bounds that exclude nothing."""

    def seconds(self, candidate: Candidate) -> float:
        return 0.0

    def peaks(self, candidate: Candidate) -> tuple[float, ...]:
        return (0.0,) * len(candidate.recompute)


@pytest.mark.parametrize("seed", some(range(12)))
def test_stages_recompute_or_store_as_costs_least_of_all_ways(seed: int) -> None:
    """Against every combination of what stages may do, simulated."""
    draw = random.Random(seed)
    stages, recipe = draw.choice((2, 3)), find_recipe(draw.choice(("gpipe", "1f1b", "zb-h1")))
    times = {
        (letter, s): draw.uniform(0.5, 2) * (5 if letter in "OP" and draw.random() < 0.3 else 1)
        for letter in "FBIWROPU"
        for s in range(stages)
    }
    saved = {s: draw.randint(50, 100) for s in range(stages)}
    sizes = Sizes(values={f"y{s}": 5 for s in saved}, saved=saved, deferred=saved)

    def predict(candidate: Candidate) -> Predicted:
        recomputing = add_recompute(recipe(stages, 6), candidate.recompute)
        schedule = add_offload(recomputing, candidate.offload)
        found = simulate_schedule(schedule, times, sizes=sizes)
        peaks = tuple(float(memory.peak) for memory in found.memory)
        return Predicted(candidate, found.makespan, peaks)

    modes = itertools.product(("never", "always"), repeat=2)
    everything = [
        predict(Candidate(recipe, 6, *zip(*ways, strict=True)))
        for ways in itertools.product(modes, repeat=stages)
    ]
    most = everything[0].peaks
    for share in (1.0, 0.8, 0.5, 0.3):
        limits = [share * peak for peak in most]
        found = evaluate([(recipe, 6)], None, limits, Nothing(), predict, None)
        fitting = [each.seconds for each in everything if each.fits(limits)]
        ours = [each.seconds for each in found if each.fits(limits)]
        assert bool(ours) == bool(fitting)
        assert not fitting or min(ours) == pytest.approx(min(fitting))


def test_of_many_ways_no_change_on_one_device_is_faster() -> None:
    recipe, stages = find_recipe("gpipe"), 8
    draw = random.Random(0)
    cost = [{"keep": 1.0, "offload": draw.random() + 1, "recompute": 1.5} for _ in range(stages)]

    def seconds(ways: Sequence[str]) -> float:  # a neighbour that does otherwise is waited for
        alone = sum(own[way] for own, way in zip(cost, ways, strict=True))
        return alone + 0.2 * sum(a != b for a, b in itertools.pairwise(ways))

    def predict(candidate: Candidate) -> Predicted:
        pairs = zip(candidate.recompute, candidate.offload, strict=True)
        ways = [
            "recompute" if r != "never" else "offload" if o != "never" else "keep" for r, o in pairs
        ]
        return Predicted(candidate, seconds(ways), tuple(2.0 - (way != "keep") for way in ways))

    found = evaluate([(recipe, 8)], None, (1.0,) * stages, Nothing(), predict, None)
    best = min(each.seconds for each in found if each.fits((1.0,) * stages))
    every = itertools.product(("offload", "recompute"), repeat=stages)
    assert len(found) < 2**stages and best <= 1.05 * min(map(seconds, every))


def test_devices_that_lack_memory_each_for_itself_are_not_tried_together() -> None:
    """Of 256 ways of four stages on two devices few are predicted, and the best is found, even
    if what costs least is of no use."""
    recipe, limits = find_recipe("zb-v"), (7.0, 8.0)
    stages = recipe.place(2)  # 0, 1, 1, 0
    freed = {"recompute": (1.5, 2.0, 2.0, 1.5), "offload": (0.0, 0.0, 0.0, 0.0)}
    cost = {"recompute": (1.0, 3.0, 1.0, 2.0), "offload": (0.0, 0.0, 0.0, 0.0)}

    def predict(candidate: Candidate) -> Predicted:
        peaks, seconds = [10.0, 10.0], 10.0
        for what in ("recompute", "offload"):
            modes: Modes = getattr(candidate, what)
            for s, home in enumerate(stages):
                if modes[s] == "always":
                    assert isinstance(home, int)
                    peaks[home] -= freed[what][s]
                    seconds += cost[what][s]
        return Predicted(candidate, seconds, (peaks[0], peaks[1]))

    class Exact(Nothing):
        def seconds(self, candidate: Candidate) -> float:
            return predict(candidate).seconds

        def peaks(self, candidate: Candidate) -> tuple[float, ...]:
            return 0.0, 0.0

    tried: list[Candidate] = []

    def counted(candidate: Candidate) -> Predicted:
        tried.append(candidate)
        return predict(candidate)

    modes = list(itertools.product((NEVER, ALWAYS), repeat=4))
    every = [predict(Candidate(recipe, 8, a, b)) for a in modes for b in modes]
    best = min(each.seconds for each in every if each.fits(limits))
    found = evaluate([(recipe, 8)], None, limits, Exact(), counted, None)
    fitting = [each.seconds for each in found if each.fits(limits)]
    assert min(fitting) == pytest.approx(best)
    assert len(tried) <= 18


@pytest.mark.parametrize("place", [one_each, vee, round_robin(2)])
def test_no_step_takes_less_than_the_closed_form(place: Placement) -> None:
    """Also where halves together take longer than a whole backward, and a schedule has both."""
    for recipe in library_over(4, place):
        stages = recipe.stages(4)
        unequal: dict[Key, float] = {("F", 2): 3.0, "B": 1.0, "I": 0.7, "W": 0.6, "U": 0.0}
        equal: dict[Key, float] = {"F": 1.0, "B": 2.0, "U": 0.0}
        for costs in (equal, unequal):
            made = simulate_schedule(recipe(4, 8), costs)
            time = made.steady.period if made.window.depth else made.makespan
            times = times_of(stages, "FBIWRU", costs)
            assert least_seconds(times, recipe(4, 8)) <= time * (1 + 1e-9)
            again: Modes = (NEVER, *(ALWAYS,) * (stages - 2), NEVER)
            slower = simulate_schedule(add_recompute(recipe(4, 8), again), costs).makespan
            least = least_seconds(times, recipe(4, 8), again)
            assert least_seconds(times, recipe(4, 8)) < least <= slower * (1 + 1e-9)


def test_no_step_takes_less_than_the_closed_form_where_stages_are_side_by_side() -> None:
    edges = (0, 1), (1, 3), (2, 3)
    costs: dict[Key, float] = {("F", 1): 3.0, "F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "U": 0.0}
    times = times_of(4, "FBIWRU", costs)
    for recipe in library_over(4):
        made = simulate_schedule(replace(recipe(4, 8), edges=edges), costs)
        bound = least_seconds(times, replace(recipe(4, 8), edges=edges))
        assert bound <= made.makespan * (1 + 1e-9)
        assert bound <= least_seconds(times, recipe(4, 8))


def test_times_between_and_beyond_those_that_are_known_lie_on_lines() -> None:
    found = [interpolated({2: 5.0, 8: 11.0}, size) for size in (1, 2, 4, 8, 20)]  # 3 + samples
    assert found == [4, 5, 7, 11, 23]
    assert [interpolated({4: 8.0}, size) for size in (1, 8)] == [2, 16]
    known = {2: 5.0, 8: 11.0, 10: 21.0}  # steeper behind 8
    assert [interpolated(known, size) for size in (1, 4, 8, 9, 20)] == [4, 7, 11, 16, 71]
    assert interpolated({2: 1.0, 4: 8.0}, 1) == 0.5  # never below a share of what is known


def test_every_power_of_two_up_to_the_batch_may_be_the_number_of_microbatches() -> None:
    assert microbatch_counts(256, 2) == [2, 4, 8, 16, 32, 64, 128, 256]
    assert microbatch_counts(24, 3) == [3, 6, 12, 24]
    assert microbatch_counts(20, 4) == [4, 8, 16, 20]
    assert microbatch_counts(2, 4) == [2]


def test_what_lacks_memory_by_its_bounds_is_not_predicted_unless_nothing_else_is_left() -> None:
    """Each stage holds 8 / m for each micro-batch that it keeps, and 1 for one that it recomputes;
    a recomputing stage takes a third longer."""
    ways = [(find_recipe(name), m) for name in ("gpipe", "1f1b") for m in (2, 4, 8, 16, 32)]
    tried: list[Candidate] = []

    class Held(Nothing):
        def seconds(self, candidate: Candidate) -> float:
            return 10 + candidate.microbatches + candidate.recompute.count("always")

        def peaks(self, candidate: Candidate) -> tuple[float, ...]:
            kept = candidate.recipe(2, candidate.microbatches).kept().stages
            pairs = zip(kept, candidate.recompute, strict=True)
            return tuple(
                8 * n / candidate.microbatches / (4 if r != "never" else 1) for n, r in pairs
            )

    def predict(candidate: Candidate) -> Predicted:
        tried.append(candidate)
        return Predicted(candidate, held.seconds(candidate) + 0.5, held.peaks(candidate))

    held = Held()
    every = [
        predict(Candidate(*way, modes))
        for way in ways
        for modes in itertools.product((NEVER, ALWAYS), repeat=2)
    ]
    for limit in (8.0, 4.0, 2.0, 1.0, 0.5, 0.2, 0.1):
        limits = (limit,) * 2
        fitting = [each.seconds for each in every if each.fits(limits)]
        tried.clear()
        found = evaluate(ways, None, limits, held, predict)[0]
        if fitting:
            assert found.fits(limits) and found.seconds == min(fitting)
            assert all(fits <= limit for each in tried for fits in held.peaks(each))
        else:  # the one that lacks least
            assert found.peaks == min((each.peaks for each in every), key=sum)
        assert len(tried) <= 2
        assert not evaluate(ways, None, limits, held, predict, worth=11.0)
