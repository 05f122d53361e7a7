"""Schedules and figures that others have published, against the verifier and the simulator.

The files in tests/published name their sources.
"""

from __future__ import annotations

import csv
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fxpipe import list_schedule
from fxpipe.errors import InputError
from fxpipe.extensions.simulator import Link, Simulation
from fxpipe.ir.recipe import Recipe, find_recipe, round_robin
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task
from fxpipe.schedules import interleaved_one_f_one_b, one_f_one_b, zb_h1, zb_h2
from fxpipe.schedules.one_f_one_b import grouped, seq1f1b
from tests.helpers.profiles import DEEP, some
from tests.oracles.small_simulator import device_kept

FOLDER = Path(__file__).parents[2] / "published"

TABLES = {
    next(line.split()[1] for line in block.splitlines() if line.startswith("schedule ")): block
    for block in (FOLDER / "schedules.txt").read_text().split("\n\n")
}

SAME = {
    "jaxpp-interleaved1f1b-p4-m8": "interleaved-1f1b",
    "jaxpp-std1f1b-p4-m8": "1f1b",
    "jaxpp-zerobubble-p3-m4": "zb-h1",
    "jaxpp-zerobubble-p4-m8": "zb-h1",
    "megatron-interleaved-v2-g2-p2-m4": "interleaved-1f1b",
    "megatron-interleaved-v2-g4-p4-m8": "interleaved-1f1b",
    "torch-dualpipev-p2-m4": "dualpipe-v",
    "torch-dualpipev-p2-m6": "dualpipe-v",
    "torch-dualpipev-p4-m10": "dualpipe-v",
    "torch-dualpipev-p4-m8": "dualpipe-v",
    "torch-interleaved1f1b-p2-m4": "interleaved-1f1b",
    "torch-interleaved1f1b-p4-m8": "interleaved-1f1b",
    "torch-zbvzerobubble-p2-m4": "zb-v",
}
"""Published schedule → the library's of the same order."""

AS_GOOD = {
    "sail-v-half": "v-half",
    "sail-v-min": "v-min",
    "sail-zbv": "zb-v",
    "torch-interleavedzero": "interleaved-zb",
    "torch-zbv": "zb-v",
}
"""How a published schedule's name begins → the library's that takes neither more time nor more
memory, in some cases in another order."""


def rows(name: str) -> list[dict[str, str]]:
    lines = (FOLDER / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def order(schedule: Schedule) -> list[list[Any]]:
    """Device → its tasks without updates, which the published lists leave out."""
    return [
        [(t.kind, t.stage, t.microbatch) for t in row if t.kind not in "UA"]
        for row in schedule.rows
    ]


@pytest.mark.parametrize("name", TABLES)
def test_a_published_schedule_verifies(name: str) -> None:
    schedule = Schedule.parse(TABLES[name])
    assert schedule.verify().simulate({"U": 0, "A": 0}).makespan > 0
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("name", SAME)
def test_the_library_has_the_published_order(name: str) -> None:
    published = Schedule.parse(TABLES[name])
    recipe = find_recipe(SAME[name])
    if recipe.place(published.devices) != published.placement:
        recipe = recipe.placed(round_robin(published.stages // published.devices))
    own = recipe(published.devices, published.microbatches)
    assert own.placement == published.placement
    assert order(own) == order(published)


@pytest.mark.parametrize("name", [name for name in TABLES if "megatron-interleaved-v2" in name])
def test_megatrons_order_comes_of_its_group_size(name: str) -> None:
    published = Schedule.parse(TABLES[name])
    size = int(name.split("-g")[1].split("-")[0])
    own = grouped(size)(published.devices, published.microbatches)
    assert own.placement == published.placement
    assert order(own) == order(published)


def test_groups_of_any_size_are_valid_and_keep_as_much_as_told() -> None:
    for v, p, m in product((2, 3), range(1, 5), range(4, 12)):
        for size in range(p, m + 1):
            if 0 < m % size < p:
                continue
            schedule = grouped(size, v)(p, m).verify()
            assert device_kept(schedule, 0) == min((v - 1) * size + 2 * p - 1, v * m)


def test_a_group_smaller_than_the_pipe_is_refused() -> None:
    for size, m, group in (2, 8, 2), (4, 5, 1), (5, 12, 2):
        with pytest.raises(InputError, match=f"leave one of {group} of {m} micro-batches"):
            grouped(size)(4, m)
    assert order(grouped(2)(4, 2).verify()) == order(interleaved_one_f_one_b(4, 2))


@pytest.mark.parametrize("name", [name for name in TABLES if name.startswith((*AS_GOOD,))])
def test_the_librarys_is_as_fast_and_as_small_as_the_published(name: str) -> None:
    published = Schedule.parse(TABLES[name])
    recipe = next(own for begin, own in AS_GOOD.items() if name.startswith(begin))
    own = find_recipe(recipe)(published.devices, published.microbatches)
    times = {"F": 1, "I": 1, "W": 1, "B": 2, "U": 0}
    assert own.simulate(times).makespan <= published.simulate(times).makespan
    assert held(own) <= held(published)


SLICED = (FOLDER / "seq1f1b.txt").read_text().split("\n\n")


def named(task: str, devices: int, device: int) -> str:
    """A task of a slice, such as F2.1, as one of the stage that is this slice on a device."""
    whole, slice = task.split(".")
    return f"{whole}@{devices * int(slice) + device}"


@pytest.mark.parametrize("table", SLICED)
def test_seq1f1bs_tables_verify_and_are_the_librarys(table: str) -> None:
    lines = [line for line in table.strip().splitlines() if not line.startswith("#")]
    p, m, slices = (int(word.partition("=")[2]) for word in lines[0].split()[1:])
    rows = [
        " ".join([*(named(task, p, d) for task in row.split()[1:]), *(f"U@{s}" for s in held)])
        for d, row in enumerate(lines[1:])
        for held in [range(d, p * slices, p)]
    ]
    head = f"schedule seq1f1b-{slices} stages={p * slices} microbatches={m} delay=0 slices={slices}"
    place = "place " + " | ".join(" ".join(map(str, range(d, p * slices, p))) for d in range(p))
    numbered = [f"{d}: {row}" for d, row in enumerate(rows)]
    schedule = Schedule.parse("\n".join([head, place, *numbered])).verify()
    assert schedule == seq1f1b(slices)(p, m)
    # without slices, the step is longer
    whole = one_f_one_b(p, m).simulate({"F": slices, "B": 2 * slices, "U": 0}).makespan
    assert schedule.simulate({"F": 1, "B": 2, "U": 0}).makespan < whole


def held(schedule: Schedule) -> int:
    """The most micro-batches, of stages, that a device keeps at once."""
    most = 0
    for row in schedule.rows:
        now = 0
        for task in row:
            now += (task.kind == "F") - (task.kind in "BW")
            most = max(most, now)
    return most


def longest(simulation: Simulation) -> float:
    """The longest time of a device from its first task to its last, without updates."""
    spans: dict[int, tuple[float, float]] = {}
    for span in simulation.spans:
        if type(span.instruction).__name__ != "Update":
            start, end = spans.get(span.device, (span.start, span.end))
            spans[span.device] = min(start, span.start), max(end, span.end)
    return max(end - start for start, end in spans.values())


def zb_1p() -> Recipe:
    """As on the page of the language."""

    @list_schedule("zb-1p", "FIW", limit=lambda device, devices: devices)
    def recipe(task: Task, devices: int) -> tuple[int, int]:
        assert task.stage is not None
        assert task.microbatch is not None
        later = {"F": task.stage - devices, "I": 0, "W": task.stage}
        return task.microbatch + later[task.kind], "IWF".index(task.kind)

    return recipe


def test_the_rules_of_zb_1p_take_as_long_as_zb_h1() -> None:
    for p in range(1, 7):
        for m in (1, p, p + 1, 2 * p, 3 * p):
            found, written = zb_1p()(p, m).verify(), zb_h1(p, m)
            assert found.simulate({"U": 0}).makespan == written.simulate({"U": 0}).makespan
            assert max(found.kept().devices) <= p


RATES = [row for row in rows("zero-bubble-rates.csv") if DEEP or int(row["p"]) == 8]
"""All 84 rates are compared in ``make deep``, half of them of simulations that take long."""


@pytest.mark.parametrize("row", RATES, ids=lambda row: f"{row['p']}-{row['m']}")
def test_zero_bubbles_rates_come_out_to_four_decimals(row: dict[str, str]) -> None:
    """Of interleaved 1F1B the rate is the one with the waits that the authors' script misses."""
    p, m, f, i, w, latency, layers = (
        int(row[key]) for key in ("p", "m", "F", "I", "W", "comm", "layers")
    )
    costs = {"F": f, "B": i + w, "I": i, "W": w, "U": 0}
    chunks, link = layers // p, Link(latency=latency)
    parts = {kind: time / chunks for kind, time in costs.items()}
    interleaved = interleaved_one_f_one_b.placed(round_robin(chunks))
    times = {
        "1f1b": one_f_one_b(p, m).simulate(costs, links=link).makespan,
        "1f1b-i-corrected": interleaved(p, m).simulate(parts, links=link).makespan,
        "zb-h1": zb_h1(p, m).simulate(costs, links=link).makespan,
        "zb-h2": longest(zb_h2(p, m).simulate(costs, links=link)),
    }
    if row["zb-1p"]:
        times["zb-1p"] = longest(zb_1p()(p, m).simulate(costs, links=link))
    rates = {name: 1 - m * (f + i + w) / time for name, time in times.items()}
    assert rates == pytest.approx({name: float(row[name]) for name in times}, abs=5.1e-5)


@pytest.mark.parametrize("row", some(rows("vocab-8xA100.csv")), ids=lambda row: row["name"])
def test_a_step_of_eight_gpus_is_predicted_within_two_percent(row: dict[str, str]) -> None:
    """From the measured times of the stages, in microseconds; communication takes no time."""
    costs: dict[Any, float] = {"F": 1, "B": 1, "U": 0}
    for kind in "FB":
        costs |= {(kind, stage): int(time) for stage, time in enumerate(row[kind].split())}
    found = one_f_one_b(int(row["p"]), int(row["m"])).simulate(costs)
    assert found.makespan / 1000 == pytest.approx(float(row["iteration_ms"]), rel=0.02)


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_size_that_counts_no_microbatches_is_named(size: Any) -> None:
    with pytest.raises(InputError, match=f"size is {size}; give a whole number"):
        grouped(size)(2, 4)
