"""Searches with bytes, against every order that keeps to the limits in a simulation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from fxpipe.errors import InputError
from fxpipe.extensions.search import local, search
from fxpipe.extensions.search.listing import order_by_policy
from fxpipe.extensions.search.read import Given, problems_of
from fxpipe.extensions.search.search import search_schedule
from fxpipe.extensions.simulator import Sizes
from fxpipe.extensions.simulator.costs import Costs, Key
from fxpipe.ir.recipe import round_robin
from fxpipe.ir.schedule import Schedule
from fxpipe.schedules import zb_h1
from tests.helpers.profiles import DEEP
from tests.oracles.every_order import all_rows, least_time

LETTERS = "FIW"


def drawn(seed: int) -> tuple[int, Costs, Sizes, list[int]]:
    """Micro-batches, times, sizes and limits of a small chain, one stage a device."""
    random = Random(seed)
    devices, microbatches = random.choice(((2, 2), (2, 3), (3, 2)))
    stages = range(devices)

    def some(low: int, high: int) -> dict[int, int]:
        return {stage: random.randint(low, high) for stage in stages}

    saved = some(2, 9)
    sizes = Sizes(
        saved=saved,
        deferred={stage: random.randint(0, most) for stage, most in saved.items()},
        gradients=some(0, 4),
        parameters=some(0, 5),
    )
    if not seed % 2:
        sizes = replace(sizes, gradients={})
    costs = {(letter, s): time for letter in LETTERS for s, time in some(1, 5).items()} | {"U": 0}
    one, all_ = (
        [held.peak for held in zb_h1(devices, m).simulate(costs, sizes=sizes).memory]
        for m in (1, microbatches)
    )
    limits = [random.randint(low, int(1.3 * high)) for low, high in zip(one, all_, strict=True)]
    return microbatches, costs, sizes, limits


def best_of_all(microbatches: int, costs: Costs, sizes: Sizes, limits: list[int]) -> float:
    (problem,) = problems_of(Given(costs, microbatches, None, None, False, None, None, None, True))
    rows = [list(all_rows(problem, device)) for device in range(problem.devices)]
    every = [(least_time(problem, chosen), chosen) for chosen in product(*rows)]
    for time, chosen in sorted(every, key=lambda pair: pair[0]):
        order = tuple(tuple(3 * s + LETTERS.index(k) for k, _, s in row) for row in chosen)
        if time < inf:
            ran = problem.schedule_of(order).simulate(costs, sizes=sizes)
            if all(held.peak <= most for held, most in zip(ran.memory, limits, strict=True)):
                return time
    return inf


@pytest.mark.parametrize(
    "seed",
    range(320) if DEEP else (1, 5, 7, 11, 14, 25, 26, 27, 29, 37, 91, 93, 103, 187),
)
def test_no_order_that_fits_is_faster(seed: int) -> None:
    microbatches, costs, sizes, limits = drawn(seed)
    best = best_of_all(microbatches, costs, sizes, limits)
    search_it = partial(search_schedule, whole=False, work=100)
    if best == inf:
        with pytest.raises(InputError):
            search_it(costs, microbatches, sizes=sizes, memory=limits)
        return
    found = search_it(costs, microbatches, sizes=sizes, memory=limits)
    assert found.bound <= best * (1 + 1e-9)
    assert found.value == pytest.approx(best)


def test_whole_backwards_are_found_where_halves_do_not_fit() -> None:
    sizes = Sizes(saved={0: 4, 1: 4}, deferred={0: 40, 1: 40})
    found = search_schedule(
        {"F": 1, "B": 2, "I": 1, "W": 1}, 3, devices=2, sizes=sizes, memory=10, work=20
    )
    assert found.schedule.kinds == set("FBU")
    with pytest.raises(InputError, match="device 0 may keep 10, and one micro-batch takes 40"):
        search_schedule({"F": 1, "I": 1, "W": 1}, 3, devices=2, sizes=sizes, memory=10, work=20)


def test_a_placement_that_does_not_fit_is_left_out() -> None:
    """Two neighbours take 12 on device 0, where round robin and the V take 11 and 7."""
    sizes = Sizes(saved={0: 6, 1: 6, 2: 5, 3: 1})
    costs: dict[Key, float] = {"F": 1, "B": 2, ("F", 3): 1}
    found = search_schedule(costs, 2, devices=2, sizes=sizes, memory=11, work=20)
    assert set(found.schedule.placement) == {0, 1}
    assert found.schedule.placement != (0, 0, 1, 1)
    assert found.problem.placement == found.schedule.placement
    assert round_robin(2)(2) != (0, 0, 1, 1)


def test_searches_with_less_memory_are_a_part_of_the_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that goes on by 0.1 s whenever it is read, and by 1 s for a list
    schedule. Nothing that is found fits, by one byte, so the
    memory is reduced again and again."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.1
        return now[0]

    def listed(*given: Any) -> object:
        now[0] += 1
        return order_by_policy(*given)

    monkeypatch.setattr(search, "perf_counter", clock)
    monkeypatch.setattr(local, "order_by_policy", listed)
    monkeypatch.setattr(search, "best_bound", lambda problem: 1.0)  # which nothing meets
    one_more = SimpleNamespace(memory=(SimpleNamespace(peak=31),) * 2)
    monkeypatch.setattr(Schedule, "simulate", lambda *given, **named: one_more)
    sizes = Sizes(saved={0: 4, 1: 4}, deferred={0: 2, 1: 2}, optimizer={0: 0})
    with pytest.raises(InputError, match=r"holds .* bytes more than it may"):
        search_schedule({"F": 1, "I": 1, "W": 1}, 4, devices=2, sizes=sizes, memory=30, seconds=20)
    assert now[0] <= 20 + 1 + 1
