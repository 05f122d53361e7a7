"""Simulations of all that schedules may say, beside the few lines of the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.published_schedules import mepipe, slimpipe
from fxpipe.errors import InputError, VerificationError
from fxpipe.extensions.clipping.opcodes import add_clip
from fxpipe.extensions.copies.opcodes import Give
from fxpipe.extensions.replicas.lowering import add_reduce
from fxpipe.extensions.replicas.opcodes import ReduceScatter
from fxpipe.extensions.simulator import Link, Sizes, simulate
from fxpipe.extensions.simulator.chain import chain_program
from fxpipe.extensions.simulator.simulation import task_of
from fxpipe.extensions.streams.events import Streams
from fxpipe.ir.instruction import Update
from fxpipe.ir.program import Program
from fxpipe.ir.recipe import RECIPES, Recipe, find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.schedule import add_recompute
from fxpipe.schedules import gpipe
from tests.extensions.copies.test_rules import copy_edits, edited_copies
from tests.extensions.streams.test_streams import FLUSHING, LIBRARY, chained, plain
from tests.helpers.plans import chain
from tests.oracles import small_simulator
from tests.oracles.small_simulator import AS_LONG, HALVES, run_of, times
from tests.oracles.stream_times import timed
from tests.schedules.test_schedules import by_name, made
from tests.verify.test_program import lowered, too_much
from tests.verify.test_program_faults import without
from tests.verify.test_schedule import accepts, too_many
from tests.verify.test_sums import edited_sums, sum_edits

PAGE = Path(__file__).parents[3] / "docs" / "schedules.md"


@by_name
@pytest.mark.parametrize("takes", [AS_LONG, HALVES, times(3, 2, 4)])
def test_the_simulator_runs_a_schedule_as_the_few_lines_of_the_tests_do(
    recipe: Recipe, takes: dict[str, int]
) -> None:
    for p, m in [(1, 1), (1, 4), (2, 3), (3, 2), (3, 7), (4, 1), (4, 9), (6, 5)]:
        schedule = made(recipe, p, m)
        steps = 3 if schedule.depth else 1
        timeline = small_simulator.simulate(run_of(schedule, steps), takes)
        simulated: list[list[tuple[float, float]]] = [[] for _ in range(p)]
        for span in schedule.simulate({k: takes[k] for k in takes}, steps=steps).spans:
            if not isinstance(span.instruction, Update | Give | ReduceScatter):
                simulated[span.device].append((span.start, span.end))
        assert simulated == [
            [(ran.start, ran.end) for ran in own if ran.task.kind not in "AU"] for own in timeline
        ]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_simulator_takes_every_schedule_of_the_library(name: str) -> None:
    assert find_recipe(name)(4, 8).simulate().makespan > 0


def test_the_bubble_in_the_table_of_schedules_is_that_of_their_simulations() -> None:
    halves = {"F": 1, "I": 1, "W": 1, "B": 2, "U": 0}
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]*) \| ([^|]*) \|", PAGE.read_text(), re.MULTILINE)
    checked = []
    for name, bubble, between in rows:
        formula, _, where = bubble.replace("v m", "2m").partition(", ")
        if name not in RECIPES or not set(formula) <= set("(pm0123456789 +−)/"):
            continue
        checked.append(name)
        for p, m in ((2, 8), (4, 8), (4, 16), (8, 16)):
            if p == 2 and where == "p even > 2":
                continue
            simulation = RECIPES[name](p, m).simulate(halves)
            for text, value in ((formula, simulation.bubble), (between, simulation.bubble_size)):
                text = re.sub(r"(?<=\d)(?=[mp(])|(?<=m)(?=\()", "*", text).replace("−", "-")
                assert value == pytest.approx(eval(text, {"p": p, "m": m})), (name, text)
    assert len(checked) == 11


def test_the_simulator_finds_the_same_times_with_streams() -> None:
    for name in LIBRARY:
        before = plain(name, 3, 4)
        assert simulate(Streams()(before)).makespan == simulate(before).makespan


@pytest.mark.parametrize("name", FLUSHING)
def test_streams_take_hardly_more_time_than_copies_that_wait_for_no_memory(name: str) -> None:
    """A copy that takes 0.4 of a forward delays nothing but what waits for its value.

    The simulator's links tell how long that takes where each copy has its own memory at once.
    """
    before = chained(name, 4, 16)
    sizes = Sizes(values={edge.value: 1 for edge in before.edges})
    best = simulate(before, links=Link(bandwidth=1 / 0.4), sizes=sizes).makespan
    assert timed(Streams()(before), copy=0.4).makespan <= 1.02 * best


def test_a_recomputed_micro_batch_counts_from_its_recompute_on() -> None:
    schedule = add_recompute(gpipe(2, 4), "always")
    assert schedule.simulate().kept == (1, 1)


def test_clipping_without_a_flush_makes_nobody_wait() -> None:
    plain = find_recipe("2bw")(4, 8)
    clipped = add_clip(plain)
    costs: dict[str | tuple[str, int], float] = {"F": 1.0, "B": 2.0, "U": 0.0, "C": 0.0}
    before = plain.simulate(costs, steps=20).makespan
    assert clipped.simulate(costs, steps=20).makespan <= before * 1.02


@copy_edits
def test_edited_copies_that_are_accepted_run(
    counts: tuple[int, int], edits: list[tuple[str, int, int]]
) -> None:
    edited = edited_copies(counts, edits)
    if accepts(edited):
        assert chain_program(add_reduce(edited)).simulate().makespan > 0


@sum_edits
def test_sums_run_between_the_backwards_and_the_update_of_their_stage(
    name: str, counts: tuple[int, int], edits: list[tuple[str, bool, int, int]]
) -> None:
    edited = edited_sums(name, counts, edits)
    if accepts(edited):
        found = edited.simulate(replicas=3, steps=edited.depth + 2)
        order = {task_of(span.instruction): (span.start, span.end) for span in found.spans}
        for task, (start, end) in order.items():
            if task.kind == "A":
                own = {
                    t: at
                    for t, at in order.items()
                    if (t.stage, t.batch) == (task.stage, task.batch)
                }
                assert all(at[1] <= start for t, at in own.items() if t.kind in "BW")
                assert all(at[0] >= end for t, at in own.items() if t.kind == "U")


@too_many
def test_counts_that_one_line_of_a_schedule_asks_for_are_refused_before_any_work(
    counts: str, row: str, message: str
) -> None:
    schedule = Schedule.parse(f"schedule mine stages=1 {counts}\nplace 0\n0: {row}\n")
    with pytest.raises(VerificationError, match=message) as caught:
        schedule.simulate()
    assert len(caught.value.faults) == 1
    assert re.search(message, schedule.grid())
    assert schedule.draw().source


@too_much
def test_counts_that_one_line_of_a_program_asks_for_are_refused_before_any_work(
    old: str, new: str, message: str
) -> None:
    program = Program.parse(str(lowered(gpipe(2, 2), chain(2))).replace(old, new))
    with pytest.raises(InputError, match=r"more than 10000000; give fewer|at most 1000 are simul"):
        program.simulate(steps=999_999_999)
    if "'" in new:
        with pytest.raises(InputError, match="reaches 9000 batches back; at most 1000 are simul"):
            program.simulate()


def test_a_simulation_names_what_waits_for_a_fetch_that_nothing_begins() -> None:
    stored = Schedule.parse(
        "schedule stored stages=1 microbatches=1 delay=0\nplace 0\n0: F0 O0 P0 B0 U\n"
    )
    program = without(lowered(stored, chain(1)), lambda x: x.opcode == "prefetch")
    with pytest.raises(InputError, match=r"await fetched.*: nothing begins what it waits for"):
        simulate(program)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("p", [2, 4])
def test_slices_fill_and_drain_a_pipeline_in_as_many_parts(n: int, p: int) -> None:
    costs = {"F": 1, "B": 2, "I": 1, "W": 1, "U": 0}
    assert slimpipe(n)(p, 4).simulate(costs).makespan == 3 * (4 * n + p - 1)
    # the last slice passes by the other devices without its weight gradients
    assert mepipe(n, 3)(p, 4).simulate(costs).makespan == 3 * 4 * n + 2 * (p - 1)
