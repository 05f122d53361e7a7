"""Exchanges inside of tasks, links that are shared or occupy who sends, skips, and other costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxpipe.schedules as fs
from fxpipe import Link, Sizes, Time, round_robin
from fxpipe.errors import InputError
from fxpipe.extensions.simulator import Simulation
from fxpipe.ir.schedule import Schedule

numbers = st.integers(0, 20)


@given(numbers, numbers, st.integers(1, 5), numbers, st.integers(0, 4))
def test_of_an_exchange_what_does_not_hide_adds_to_its_task(
    compute: int, size: int, rate: int, latency: int, quarters: int
) -> None:
    time = Time(compute, size, Link(latency, rate), hidden=quarters / 4, messages=3)
    exchange = 3 * latency + size / rate if size else 0
    shown = (4 - quarters) / 4 * exchange
    # neither ends before its own time is over
    assert time.total == pytest.approx(max(compute + shown, exchange))
    costs: Any = {"F": time, "B": 0, "U": 0}
    found = fs.one_f_one_b(2, 3).simulate(costs)
    assert found.makespan == pytest.approx(4 * time.total)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Time(-1), "compute of a Time is -1; give a number of at least 0"),
        (lambda: Time(1, hidden=2), "hidden share of a Time is 2; give a number from 0 to 1"),
        (lambda: Link(occupies=-1), "occupies its device is -1; give a number from 0 to 1"),
        (lambda: Link(of=3), "a link is of 3; give the name"),  # type: ignore[arg-type]
        (lambda: Time(1, link=3), "link of a Time is 3"),  # type: ignore[arg-type]
    ],
)
def test_wrong_links_and_times_are_refused(make: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        make()


VALUES = Sizes({"y0": 6, "y1": 6, "y2": 6})


def test_a_send_occupies_its_device_for_a_share_of_the_transfer() -> None:
    costs = {"F": 10, "B": 10, "U": 0}
    for share in (0, 0.5, 1):
        link = Link(latency=2, bandwidth=3, occupies=share)
        found = fs.gpipe(2, 3).simulate(costs, links=link, sizes=VALUES)
        starts = [s.start for s in found.spans if s.device == 0 and s.instruction.letter == "F"]
        step = 10 + share * (2 + 6 / 3)
        assert starts == [0, step, 2 * step]


def sends(found: Simulation) -> list[tuple[float, float, int, int]]:
    return sorted((t.ready, t.start, t.source, t.target) for t in found.transfers)


@pytest.mark.parametrize("schedule", [fs.one_f_one_b(4, 6), fs.gpipe(3, 4), fs.zb_h1(4, 6)])
def test_values_of_all_devices_take_a_shared_link_in_the_order_in_which_they_are_ready(
    schedule: Schedule,
) -> None:
    taken = 5.0
    sizes = Sizes({f"y{s}": 10 for s in range(4)})
    link = Link(latency=1, bandwidth=2, of="bus")
    found = schedule.simulate({"F": 3, "B": 6, "I": 3, "W": 3, "U": 0}, links=link, sizes=sizes)
    free = 0.0
    for ready, start, _, _ in sends(found):  # the reference: one queue
        assert start == max(ready, free)
        free = start + taken
    apart = replace(link, of="")
    alone = schedule.simulate({"F": 3, "B": 6, "I": 3, "W": 3, "U": 0}, links=apart, sizes=sizes)
    assert alone.makespan < found.makespan


def test_sums_of_gradients_take_the_link_that_transfers_take() -> None:
    sizes = Sizes({f"y{s}": 8 for s in range(3)}, gradients=dict.fromkeys(range(3), 40))
    costs = {"F": 1, "B": 2, "U": 0, "A": 5}  # while the last stage reduces, others send
    schedule = fs.one_f_one_b(3, 4)
    pairs = {*product(range(3), range(3))}
    apart = schedule.simulate(
        costs, links=dict.fromkeys(pairs, Link(bandwidth=4)), sizes=sizes, replicas=2
    )
    shared = schedule.simulate(
        costs, links=dict.fromkeys(pairs, Link(bandwidth=4, of="card")), sizes=sizes, replicas=2
    )
    busy = 0.0
    for transfer in sorted(shared.transfers, key=lambda t: (t.ready, t.start)):
        assert transfer.start == max(busy, transfer.ready)
        busy = transfer.start + (40 if not hasattr(transfer.buffer, "value") else 8) / 4
    assert shared.makespan > apart.makespan


def test_a_skip_goes_straight_to_its_stage_and_its_gradient_back() -> None:
    sizes = Sizes({"y0": 1, "y1": 1, "y2": 1, "far": 100})
    links = Link(bandwidth=1)
    costs = {"F": 1, "B": 1, "U": 0}
    found = fs.gpipe(3, 1).simulate(costs, links=links, sizes=sizes, edges={"far": (0, 2)})
    # F0, then the skip, F2 and B2, the skip's gradient, and B0
    assert found.makespan == 1 + 100 + 1 + 1 + 100 + 1
    assert found.memory[2].peak >= 100


@pytest.mark.parametrize("edges", [{"far": (2, 0)}, {"far": (0, 3)}, {"far": 1}, {"y0": (0, 2)}])
def test_skips_lead_to_later_stages_and_have_names_of_their_own(edges: Any) -> None:
    with pytest.raises(InputError, match="edges has"):
        fs.gpipe(3, 2).simulate(edges=edges)


def test_what_a_device_and_its_allocator_take_besides_is_a_part_of_its_memory() -> None:
    sizes = Sizes({"y0": 10}, saved={0: 100, 1: 100}, parameters={0: 50, 1: 50})
    plain = fs.one_f_one_b(2, 4).simulate(sizes=sizes).memory
    more = fs.one_f_one_b(2, 4).simulate(sizes=replace(sizes, context=7, reserved=1.5)).memory
    for before, after in zip(plain, more, strict=True):
        assert after.peak == 7 + -(-3 * before.peak // 2)
        assert after.parts["besides"] == after.peak - before.peak
        assert sum(after.parts.values()) == after.peak


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["1f1b", "interleaved"]))
def test_other_costs_give_what_a_new_simulation_gives(f: int, b: int, name: str) -> None:
    recipe = fs.one_f_one_b
    if name == "interleaved":
        recipe = fs.interleaved_one_f_one_b.placed(round_robin(3))
    schedule = recipe(2, 4)
    first = schedule.simulate()
    costs: Any = {"F": f, "B": b, ("F", 1): f + 1, "U": 0}
    links = Link(2)
    again, anew = first.with_costs(costs, links=links), schedule.simulate(costs, links=links)
    assert again.events == anew.events
    assert again.with_costs(costs).events == anew.events  # links stay
