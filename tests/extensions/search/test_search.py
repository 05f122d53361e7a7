"""What a search finds, and what it says of that."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import inf
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxpipe
from fxpipe.errors import InputError
from fxpipe.extensions.copies.chimera import both_ways
from fxpipe.extensions.search.listing import Habit, order_by_policy
from fxpipe.extensions.search.local import given_policies
from fxpipe.extensions.search.problem import Problem
from fxpipe.extensions.search.read import Given, problems_of
from fxpipe.extensions.search.search import Found, library_orders, search_schedule
from fxpipe.extensions.search.timing import fits, value_of
from fxpipe.extensions.simulator import Link, Sizes
from fxpipe.extensions.simulator.costs import Key
from fxpipe.ir.plan import StageCosts
from fxpipe.ir.recipe import find_recipe
from tests.extensions.search.problems import (
    UNEQUAL,
    problem_of,
    problems,
    random_policy,
)
from tests.helpers.plans import chain


@given(problems((1, 5), (1, 6)), st.integers(0, 10**6))
def test_every_list_schedule_is_valid_and_keeps_to_the_memory(problem: Problem, seed: int) -> None:
    random = Random(seed)
    policies = [*list(given_policies(problem))[::17], *(random_policy(problem, random),) * 3]
    for policy in policies:
        value, rows = order_by_policy(problem, policy, inf)
        order = tuple(map(tuple, rows))
        assert fits(problem, order)
        problem.schedule_of(order).verify()
        assert value_of(problem, order) <= value * (1 + 1e-9)


@pytest.mark.parametrize("placement", [fxpipe.vee, fxpipe.round_robin(2), (0, 0, 1, 2, 1)])
@pytest.mark.parametrize("memory", [5, 7, None])
def test_stages_that_share_a_device_do_not_lock_it(placement: object, memory: int | None) -> None:
    found = search_schedule(
        {"F": 2, "I": 3, "W": 1, "U": 0},
        5,
        devices=3,
        placement=placement,  # type: ignore[arg-type]
        memory=memory,
        work=150,
    )
    found.schedule.verify()
    kept = found.schedule.kept()
    assert max(kept.devices) <= (memory or inf)
    assert found.schedule.simulate({"F": 2, "I": 3, "W": 1, "U": 0}).makespan == found.value


@pytest.mark.smoke
@pytest.mark.parametrize("whole", [True, False])
def test_what_it_takes_is_what_a_simulation_says(whole: bool) -> None:
    costs: dict[Key, float] = {**UNEQUAL, "B": 5, "U": 0.5, ("U", 1): 2}
    links = {(0, 1): Link(0.5), (1, 0): Link(0.25), (1, 2): Link(1), (2, 1): Link(0)}
    found = search_schedule(costs, 6, links=links, whole=whole, work=200)
    assert found.schedule.simulate(costs, links=links).makespan == pytest.approx(found.value)


def test_times_of_single_micro_batches_are_refused() -> None:
    costs: dict[Key, float] = {"F": 1, ("F", 0, 2): 1}
    with pytest.raises(InputError, match=r"costs has \('F', 0, 2\), .* leave the micro-batch out"):
        fxpipe.search_schedule(costs, 4, devices=2)


def test_steps_that_follow_one_another_take_what_it_says() -> None:
    costs: dict[Key, float] = {**UNEQUAL, ("U", 0): 2}
    found = search_schedule(costs, 6, flush=False, work=300)
    few, many = (found.schedule.simulate(costs, steps=n).makespan for n in (6, 12))
    assert many - few <= 6 * found.value * (1 + 1e-9)
    assert "2bw" not in found.library  # it mixes batches on a device
    assert found.value < search_schedule(costs, 6, work=300).value


def test_versions_of_the_weights_count_in_a_devices_memory() -> None:
    """A version takes as much as the gradients; both steps and versions are in the limits."""
    sizes = Sizes(
        saved=dict.fromkeys(range(3), 10),
        parameters=dict.fromkeys(range(3), 50),
        gradients=dict.fromkeys(range(3), 50),
    )
    given: Any = {"costs": {"F": 1, "B": 2}, "microbatches": 4, "devices": 3, "sizes": sizes}
    given |= {"work": 60, "flush": False}
    with pytest.raises(InputError, match="device 0 holds 10 bytes more than it may"):
        search_schedule(**given, memory=150)
    found = search_schedule(**given, memory=170)
    ran = found.schedule.simulate({"F": 1, "B": 2}, sizes=sizes)
    assert max(has.peak for has in ran.memory) <= 170


def test_it_is_never_slower_than_a_library_schedule_that_fits() -> None:
    for memory in (2, 3, 4, None):
        found = search_schedule(UNEQUAL, 8, memory=memory, work=1)
        times = found.library
        assert "1f1b" in times or memory == 2
        assert found.value <= min(times.values())
        for name, time in times.items():
            schedule = find_recipe(name)(3, 8)
            simulated = schedule.simulate({**UNEQUAL, ("B", 1): 5, "B": 3}).makespan
            assert time <= simulated


@pytest.mark.smoke
def test_with_ample_memory_the_v_and_one_stage_each_reach_the_bound() -> None:
    for placement, stages in ((fxpipe.vee, 8), (fxpipe.one_each, 4)):
        costs = {("F", s): 3 + s % 3 for s in range(stages)} | {"I": 4, "W": 3, "U": 0}
        found = search_schedule(costs, 12, devices=4, placement=placement, work=400)
        assert found.gap <= 0.01


@pytest.mark.parametrize(("hold", "third"), [(0.0, 0), (0.3, 0), (1.0, 6)])
def test_a_first_stage_may_wait_for_a_forward_that_a_later_one_is_about_to_get(
    hold: float, third: int
) -> None:
    """At 6 the device could go on with its first stage until 9; its other one is due at 7."""
    costs: dict[Key, float] = {"F": 3, ("F", 1): 4, "I": 3, "W": 3, "U": 0}
    given = Given(costs, 4, 2, (0, 1, 0), None, None, None, None, True)
    problem = problems_of(given)[0]
    habit = Habit(4, 0.0, -1e9, 1.0, 0.0, hold)
    first = habit._replace(turn=10.0)
    _, order = order_by_policy(problem, (first, habit, habit), inf)
    assert order[0][:3] == [0, 0, third]


def test_without_a_placement_all_ways_to_place_the_stages_are_searched() -> None:
    costs: dict[Key, float] = {("F", 3): 1, "I": 1, "W": 1, "U": 0}
    found = search_schedule(costs, 4, devices=2, work=100)
    alone = [
        search_schedule(costs, 4, placement=places, work=100)
        for places in ((0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0))
    ]
    assert found.value == min(each.value for each in alone)
    assert found.bound == min(each.bound for each in alone)


def test_whole_backwards_and_halves_are_both_searched_where_both_have_a_time() -> None:
    found = search_schedule({"F": 2, "B": 3, "I": 2, "W": 2, "U": 0}, 4, devices=2, work=50)
    assert found.problem.whole
    halves = search_schedule({"F": 2, "I": 2, "W": 2, "U": 0}, 4, devices=2, work=50)
    assert found.value <= halves.value
    assert found.bound <= halves.bound


def test_a_whole_backward_that_one_stage_has_no_time_for_takes_as_long_as_its_halves() -> None:
    costs: dict[Key, float] = {"F": 1, "I": 5, "W": 5, ("B", 1): 7, "U": 0}
    found = search_schedule(costs, 2, devices=2, whole=True, work=10)
    assert found.problem.backward == (10, 7)


def test_the_schedule_stays_within_the_limits_in_a_simulation_with_sizes() -> None:
    sizes = Sizes(
        saved={0: 10, 1: 8, 2: 10},
        deferred={0: 4, 1: 12, 2: 4},
        parameters={0: 50, 1: 50, 2: 50},
        gradients={0: 50, 1: 50, 2: 50},
    )
    memory = [140, 134, 126]
    found = search_schedule(UNEQUAL, 6, memory=memory, sizes=sizes, work=200)
    ran = found.schedule.simulate(UNEQUAL, sizes=sizes)
    assert all(has.peak <= most for has, most in zip(ran.memory, memory, strict=True))
    with pytest.raises(InputError, match=r"device 2 .*more memory|device 2 may keep"):
        memory = [140, 134, 108]
        search_schedule(UNEQUAL, 6, memory=memory, sizes=sizes, work=200)


def test_library_schedules_that_a_simulation_has_no_room_for_are_not_compared_with() -> None:
    """Others are candidates in any case, also where the search had to hold memory back."""
    costs: dict[Key, float] = {"F": 0.3681213740081486, "I": 3, "W": 0, "U": 0}
    sizes = Sizes(
        values={"y0": 4, "y1": 3, "y2": 1, "y3": 4},
        saved={0: 7, 1: 4, 2: 8, 3: 1},
        deferred={0: 1, 1: 3, 2: 5, 3: 1},
        parameters={0: 5, 1: 0, 2: 9, 3: 3},
        optimizer={0: 2, 1: 5, 2: 1, 3: 1},
    )
    for memory in (50, 52):
        own = {"memory": memory, "sizes": sizes, "work": 30}
        found = search_schedule(costs, 6, devices=2, placement=fxpipe.vee, **own)  # type: ignore[arg-type]
        times = found.library
        assert min(times.values()) >= found.value
        for name in ("zb-v", "v-half", "v-min"):  # no other has halves alone
            ran = find_recipe(name)(2, 6).simulate(costs, sizes=sizes)
            assert (name in times) == (max(has.peak for has in ran.memory) <= memory)


def test_the_same_seed_and_work_give_the_same() -> None:
    def once(seed: int) -> Found:
        return search_schedule(UNEQUAL, 5, memory=2.5, work=60, seed=seed)

    assert once(3) == once(3)


def test_the_measured_times_of_a_plan_are_searched_with() -> None:
    plan = chain(3)
    with pytest.raises(InputError, match="not measured"):
        search_schedule(plan, 4)
    stages = [
        replace(stage, costs=StageCosts(1.0 + stage.index, 3.0, 2.0, 1.0)) for stage in plan.stages
    ]
    found = search_schedule(replace(plan, stages=tuple(stages)), 4, work=50)
    problem = found.problem
    assert problem.forward == (1.0, 2.0, 3.0)
    assert (problem.backward, problem.weight) in (
        ((2.0,) * 3, (1.0,) * 3),
        ((3.0,) * 3, (0.0,) * 3),
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"microbatches": 0}, "microbatches"),
        ({"costs": {"F": 1}}, "devices="),
        ({"costs": {"Q": 1}, "devices": 2}, "no kind of task 'Q'"),
        ({"devices": 0}, "devices is 0"),
        ({"costs": 3, "devices": 2, "placement": fxpipe.vee}, "costs is 3; map letters"),
        ({"memory": 0.5}, "one micro-batch takes 1"),
        ({"memory": [3, 3]}, "2 numbers for 3 devices"),
        ({"placement": (0, 2)}, "give each stage a device"),
        ({"placement": "vee"}, "placement is .vee.; give each stage a device"),
        ({"placement": both_ways, "devices": 3}, "a search keeps each stage on one device"),
        ({"seconds": 0}, "seconds is 0"),
        ({"seconds": "1"}, "seconds is '1'"),
        ({"work": "1"}, "work is '1'"),
        ({"seed": [1]}, r"seed is \[1\]"),
        ({"microbatches": 2.0}, r"microbatches is 2\.0"),
        ({"costs": None}, "costs is None; map letters"),
        ({"costs": {3: 1}}, "costs has the key 3; write a letter"),
        ({"costs": {("F",): 1}}, r"costs has the key \('F',\); write a letter"),
        ({"costs": {("F", "a"): 1}}, r"costs has the key \('F', 'a'\); write a letter"),
        ({"memory": [1, None, 1]}, r"memory is \[1, None, 1\]; give a number"),
        ({"memory": {0: 1}}, r"memory is \{0: 1\}; give a number"),
        ({"placement": 3}, "placement is 3; give each stage a device"),
        ({"placement": [0.0, 1.0]}, r"placement is \[0\.0, 1\.0\]; give each stage a device"),
        ({"placement": lambda p: None, "devices": 2}, "which gives no device for each stage"),
        ({"placement": lambda p: (0, -1), "devices": 2}, r"\(0, -1\); give each stage a device"),
        ({"placement": lambda p: (0, 1, 2), "devices": 2}, "has 3 devices and devices is 2"),
        ({"placement": (0, 1, 2), "devices": 2}, "placement has 3 devices and devices is 2"),
        ({"costs": {("F", 10**8): 1}}, "at most 50000 forwards are searched"),
        ({"microbatches": 10**6}, "at most 50000 forwards are searched"),
        ({"sizes": {}}, r"sizes is \{\}; give Sizes"),
        ({"flush": "no"}, "flush is 'no'; give True or False"),
        ({"whole": 2}, "whole is 2; give True or False"),
        ({"links": 1.0}, r"links is 1\.0; give one Link"),
        ({"links": {(0, 1): 3}}, r"links\[\(0, 1\)\] is 3; give Link"),
        ({"links": {}}, r"links\[0, 1\]"),
        ({"links": Link(0, 1.0)}, "sizes="),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        search_schedule(**{"costs": UNEQUAL, "microbatches": 4, "work": 5} | arguments)  # type: ignore[arg-type]


def test_library_schedules_of_other_problems_are_left_out() -> None:
    """gpipe keeps more than fits, 2bw reads older weights, the others have stages elsewhere."""
    found = library_orders(problem_of(3, 4, [2, 3, 4], 1, False, True))
    assert "naive" in found
    assert not {"gpipe", "2bw", "zb-v", "chimera"} & found.keys()


def test_where_transfers_alone_take_time_the_bound_is_theirs() -> None:
    costs: dict[Key, float] = {"F": 0, "B": 0, "U": 0}
    found = search_schedule(costs, 1, devices=3, links=Link(3e-6), work=50)
    assert found.value == found.bound == pytest.approx(12e-6)
    assert search_schedule(costs, 1, devices=3, work=50).gap == 0


def test_counts_times_and_placements_may_be_of_numpy() -> None:
    costs: dict[str, Any] = {"F": np.float32(1.5), "B": Fraction(3, 2)}
    given: dict[str, Any] = {"microbatches": np.int64(4), "placement": np.arange(2)}
    found = search_schedule(costs, **given, work=5)
    assert found.schedule.placement == (0, 1)
    assert str(found).startswith("a step takes 15.5;")
