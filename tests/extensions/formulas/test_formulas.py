"""Closed forms: equal to the papers', to the simulator, to drawn grids and to real runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import And, Eq, Expr, Integer, Max, Min, Mod, Rational, floor, limit, oo, simplify, true
from sympy.logic.boolalg import Boolean
from torch import nn

import fxpipe
from fxpipe.errors import FormulaError, InputError
from fxpipe.extensions.formulas import Formulas, T, m, p, recipe_formulas, s, time, v
from fxpipe.extensions.offload.add_offload import add_offload
from fxpipe.ir.recipe import Recipe, find_recipe, round_robin
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, B, F, U, define_task
from fxpipe.passes.schedule import add_recompute, modes_of
from fxpipe.schedules.dualpipe_v import dualpipe
from tests.helpers.profiles import DEEP, some
from tests.oracles import small_simulator
from tests.schedules.test_flushing import GRIDS

TF, TB, TI, TW, TA, TU = map(time, "FBIWAU")
AS_LONG = Eq(TB, TF)
EQUAL = (Eq(TI, TF), Eq(TW, TF))
FOLDED = {"given": EQUAL, "where": And(m >= 2 * p, p > 2), "devices": range(3, 9)}

FORMS: dict[str, dict[str, Any]] = {
    "naive": {},
    "gpipe": {},
    "1f1b": {},
    "interleaved-1f1b": {"chunks": (1, 2, 3), "where": Eq(Mod(m, p), 0)},
    "zb-h1": {"given": (TW <= TF,), "where": m >= p},
    "zb-h2": {"given": EQUAL, "where": m >= 2 * p},
    "zb-v": {"given": EQUAL, "where": m >= 2 * p},
    "v-half": FOLDED,
    "v-min": {
        **FOLDED,
        "devices": range(3, 12),
        "microbatches": lambda p: (2 * p, 2 * p + 1, 2 * p + 3),
    },
    "dualpipe-v": {
        "given": (Eq(TB, TI + TW), Eq(TI, TF), TW <= TF),
        "where": m >= 2 * p,
        "devices": (1, 2, 3, 4, 5),
    },
    "2bw": {"where": m >= p, "devices": (1, 2, 3, 4)},
    "pipedream": {"devices": (1, 2, 3, 4)},
    "1f1b-async": {"devices": (1, 2, 3, 4)},
    "cdp-v2": {"devices": (1, 2, 3, 4)},
    "chimera": {
        "given": (AS_LONG,),
        "where": And(Eq(Mod(p, 2), 0), Eq(Mod(m, p), 0)),
        "devices": (2, 4, 6, 8),
        "microbatches": lambda p: (p, 2 * p, 3 * p),
    },
}
"""Schedule → the assumptions that its published formulas need."""

OVERLAPPING = ("2bw", "pipedream", "1f1b-async", "cdp-v2")

PUBLISHED: dict[str, dict[str, Expr]] = {
    "naive": {
        "makespan": m * p * (TF + TB) + TU,
        "bubble": (p - 1) / p,
        "stash": Integer(1),
        "peak_stash": Integer(1),
    },
    "gpipe": {
        "makespan": (m + p - 1) * (TF + TB) + TU,
        "bubble": (p - 1) / (m + p - 1),
        "bubble_size": (p - 1) * (TF + TB),
        "stash": m,
        "peak_stash": m,
    },
    "1f1b": {
        "makespan": (m + p - 1) * (TF + TB) + TU,
        "bubble": (p - 1) / (m + p - 1),
        "bubble_size": (p - 1) * (TF + TB),
        "stash": Min(p - s, m),
        "peak_stash": Min(p, m),
    },
    "interleaved-1f1b": {
        "makespan": (v * m + p - 1) * (TF + TB) + v * TU,
        "bubble": (p - 1) / (v * m + p - 1),
        "peak_stash": v * (p + (p - 1) / v),
    },
    "zb-h1": {
        "bubble_size": (p - 1) * (TF + TI - TW),
        "stash": p,
        "peak_stash": p,
    },
    "zb-h2": {"bubble_size": Integer(0), "peak_stash": 2 * p - 1},
    "zb-v": {"bubble_size": Integer(0), "peak_stash": 2 * p},
    "v-half": {"peak_stash": 2 * floor((p + 2) / 2)},
    "v-min": {"peak_stash": 2 * floor((p + 4) / 3)},
    "dualpipe-v": {
        # the paper's, for passes of a forward and a backward that take as long as both
        "bubble_size": (p - 1) * (TF + TI - TW),
        "peak_stash": 2 * p + 1,
    },
    "2bw": {
        "makespan": (m * T + p - 1) * (TF + TB) + T * TU,
        "bubble": (p - 1) / (m * T + p - 1),
        "stash": p - s,
    },
    "pipedream": {"bubble": (p - 1) / (m * T + p - 1)},
    "1f1b-async": {"bubble": (p - 1) / (m * T + p - 1), "stash": p - s},
    "cdp-v2": {"bubble": (p - 1) / (m * T + p - 1), "stash": p - s},
    "chimera": {
        "makespan": (2 * m + p - 2) * TF + TA + TU,
        "bubble": (p - 2) / (2 * m + p - 2),
        "peak_stash": p,
    },
}
"""Schedule → its rows in the papers, a stash in micro-batches of one stage."""

POINTS = [(1, 3), (2, 2), (2, 5), (3, 3), (3, 7), (4, 4), (4, 9), (5, 12), (7, 7), (7, 15), (8, 16)]
"""Most of them are none that the forms were fitted on."""


@cache
def formulas(name: str) -> Formulas:
    return recipe_formulas(find_recipe(name), **FORMS[name])


def holds(where: Boolean, at: Mapping[Expr, int]) -> bool:
    return bool(where.subs(at) == true)


def same(a: Expr, b: Expr) -> bool:
    """Whether two forms are equal, which sympy may see only number by number."""
    return simplify(a - b) == 0 or all(
        simplify((a - b).subs({p: x, m: y})) == 0 for x in range(1, 9) for y in range(1, 9)
    )


@pytest.mark.smoke
@pytest.mark.parametrize("name", some(PUBLISHED, 6))
def test_the_forms_are_those_of_the_papers(name: str) -> None:
    for quantity, published in PUBLISHED[name].items():
        found = formulas(name)[quantity].expression
        known = {"dualpipe-v": {TI: TF}, "chimera": {TB: TF}}.get(name, {})
        assert same(found.subs(known), published.subs(known)), f"{quantity}: {found}"


@pytest.mark.parametrize("name", FORMS)
def test_the_forms_are_what_is_simulated(name: str) -> None:
    """Over points and times that they were not fitted on, as two simulators find them."""
    forms = formulas(name)
    recipe = find_recipe(name)
    chunks = 2 if "chunks" in FORMS[name] else None
    checked = 0
    for devices, microbatches in POINTS if DEEP else POINTS[::2]:
        at = {p: devices, m: microbatches, v: 2, T: 4}
        placed = recipe.placed(round_robin(2)) if chunks else recipe
        if not holds(FORMS[name].get("where", true), at):
            continue
        schedule = placed(devices, microbatches)
        steps = 4 if name in OVERLAPPING else 1
        for forward, inputs, weights, update in ((3, 3, 3, 0), (5, 5, 2, 0), (4, 4, 1, 2)):
            if EQUAL[0] in FORMS[name].get("given", ()) and forward != weights:
                continue
            if AS_LONG in FORMS[name].get("given", ()):
                inputs, weights = forward, 0
            costs = {"F": forward, "B": inputs + weights, "I": inputs, "W": weights, "U": update}
            costs["A"] = 0
            numbers = at | {time(letter): cost for letter, cost in costs.items()}
            ran = schedule.simulate(costs, steps=steps)
            found: dict[str, float] = {
                "makespan": ran.makespan,
                "peak_stash": max(ran.device_stash),
            }
            if not update:
                drawn = small_simulator.simulate(small_simulator.run_of(schedule, steps), costs)
                assert small_simulator.makespan(drawn) == ran.makespan
                found |= {"bubble_size": ran.bubble_size, "bubble": ran.bubble}
            for quantity, simulated in found.items():
                if quantity in forms.found and holds(forms[quantity].where, at):
                    form = forms[quantity].expression.subs(numbers)
                    assert float(form) == pytest.approx(simulated, rel=1e-12, abs=1e-12), quantity
                    checked += 1
            if "stash" in forms.found and holds(forms["stash"].where, at):
                for stage, kept in enumerate(ran.stash):
                    assert forms.stash.subs({**numbers, s: stage}) == kept
    assert checked >= 4


@pytest.mark.parametrize(("name", "devices", "microbatches"), GRIDS)
def test_the_forms_are_what_is_drawn(name: str, devices: int, microbatches: int) -> None:
    if name not in FORMS or name == "interleaved-1f1b":
        return
    rows = [line.split() for line in GRIDS[name, devices, microbatches].strip().splitlines()]
    numbers = {p: devices, m: microbatches, TF: 1, TB: 1, TU: 0}
    assert formulas(name).makespan.subs(numbers) == len(rows[0])
    idle = sum(row.count(".") for row in rows)
    assert formulas(name).bubble.subs(numbers) == Rational(idle, sum(map(len, rows)))


def test_halves_of_the_bubble_and_thirds_of_the_memory() -> None:
    """V-Half has half of 1F1B's bubble and memory; V-Min two thirds and a third, as p grows."""
    whole = 6 * (p - 1) * TF  # 1F1B with two equal stages a device: as long a bubble as with one
    for name, bubble, memory in (
        ("v-half", Rational(1, 2), Rational(1, 2)),
        ("v-min", Rational(2, 3), Rational(1, 3)),
    ):
        forms = formulas(name)
        for residue in range(6):
            many = 6000 + residue
            ratio = (forms.bubble_size / whole).subs({p: many, TF: 1})
            assert abs(ratio - bubble) < Rational(1, 1000)
            assert abs(forms.peak_stash.subs(p, many) / (2 * many) - memory) < Rational(1, 1000)


def test_without_a_flush_the_bubble_vanishes() -> None:
    for name in OVERLAPPING:
        assert limit(formulas(name).bubble, T, oo) == 0
        steady = find_recipe(name)(4, 5).simulate({"U": 0}).steady
        assert steady.bubble == pytest.approx(0)
        assert steady.period == 5 * 3


def test_the_forms_say_where_they_hold() -> None:
    interleaved = formulas("interleaved-1f1b")
    assert interleaved["bubble"].where == Eq(Mod(m, p), 0)
    odd = find_recipe("interleaved-1f1b").placed(round_robin(3))(3, 2)
    free = {"U": 0}
    assert odd.simulate(free).bubble > float(interleaved.bubble.subs({p: 3, m: 2, v: 3}))
    assert formulas("1f1b")["bubble"].where is true
    short = find_recipe("zb-h2")(4, 5)
    assert short.simulate({"F": 1, "I": 1, "W": 1, "U": 0}).bubble_size > 0
    assert "for" in str(formulas("zb-h2")) and "given Eq(T_I, T_F)" in str(formulas("zb-h2"))


@pytest.mark.models
def test_a_real_run_keeps_what_the_forms_say() -> None:
    x = torch.randn(8, 3)
    for name, counts in (
        ("gpipe", ((3, 2), (4, 8))),
        ("1f1b", ((3, 2), (4, 8))),
        ("naive", ((4, 2),)),
        ("zb-h1", ((3, 4),)),
        ("zb-h2", ((2, 8),)),
    ):
        for devices, microbatches in counts:
            model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
            with fxpipe.compile(
                model,
                ["cpu"] * devices,
                schedule=name,
                microbatches=microbatches,
                loss=nn.functional.mse_loss,
            ) as pipe:
                pipe.step(x, target=x)
                numbers = {p: devices, m: microbatches}
                assert pipe.stashed == {
                    stage: formulas(name).stash.subs({**numbers, s: stage})
                    for stage in range(devices)
                }


@settings(max_examples=100 if DEEP else 8)
@given(
    st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "dualpipe-v"]),
    st.integers(1, 4),
    st.integers(1, 5),
    st.lists(st.integers(0, 9), min_size=5, max_size=5),
)
def test_one_schedule_has_its_forms_for_all_times(
    name: str, devices: int, microbatches: int, times: list[int]
) -> None:
    schedule = find_recipe(name)(devices, microbatches)
    forms = schedule.formulas()
    costs = dict(zip("FBIWU", times, strict=True))
    numbers = {time(letter): cost for letter, cost in costs.items()}
    ran = schedule.simulate(costs)
    if "makespan" in forms.found:
        assert forms.makespan.subs(numbers) == ran.makespan
    if "bubble_size" in forms.found:
        assert forms.bubble_size.subs(numbers) == ran.bubble_size
    assert [forms.stash.subs(s, stage) for stage in range(schedule.stages)] == list(ran.stash)


def test_an_order_of_ones_own_has_forms_too() -> None:

    def rows(device: int, devices: int, microbatches: int) -> Any:
        yield from (F(i) for i in range(microbatches))
        yield from (B(i) for i in range(microbatches))
        yield U()

    forms = Recipe("mine", rows)(2, 3).formulas()
    assert same(forms.makespan, 4 * (TF + TB) + TU)
    assert forms.bubble == Rational(1, 4)
    assert forms.stash == forms.peak_stash == 3
    assert Recipe("one", lambda *_: [F(0)])(1, 1).formulas().makespan == TF


def test_the_longest_path_depends_on_the_times() -> None:
    """Device 1 has a second stage's work before the gradient that device 0 waits for."""
    schedule = Schedule.parse(
        "schedule odd stages=3 microbatches=1 delay=0\nplace 0 2 | 1\n"
        "0: F0@0 F0@2 I0@2 W0@2 I0@0 W0@0 U@0 U@2\n1: F0@1 I0@1 W0@1 U@1\n"
    )
    with pytest.raises(FormulaError, match="say more about the times of its tasks with given="):
        _ = schedule.formulas().makespan
    assert schedule.formulas(given=[TW <= TI]).makespan == 3 * TF + 3 * TI + TW + 2 * TU
    assert schedule.formulas(given=[TW >= TI]).makespan == 3 * TF + 2 * TI + 2 * TW + 2 * TU


def test_no_form_is_made_up() -> None:
    def ragged(device: int, devices: int, microbatches: int) -> Any:
        ahead = min(max((microbatches * microbatches) % 7, devices - device), microbatches)
        yield from (F(i) for i in range(ahead))
        for i in range(microbatches):
            yield B(i)
            if i + ahead < microbatches:
                yield F(i + ahead)
        yield U()

    forms = Recipe("ragged", ragged).formulas(devices=(1, 2, 3, 4))
    with pytest.raises(FormulaError, match="no closed form found for the peak_stash"):
        _ = forms.peak_stash
    assert "no closed form" in str(forms)


def test_relations_that_are_none_of_times_are_refused() -> None:
    one = find_recipe("1f1b")
    with pytest.raises(InputError, match="could be below 0"):
        one.formulas(given=(Eq(TB, TF - TU),))
    with pytest.raises(InputError, match="one time on its left"):
        one.formulas(given=(Eq(TF + TU, TB),))
    with pytest.raises(InputError, match="no sum of times"):
        one.formulas(given=(TF * TB <= TF,))
    with pytest.raises(InputError, match="none of the points"):
        one.formulas(where=m > 1000)


@pytest.mark.parametrize(
    "options",
    [
        {"given": TW <= TF},
        {"devices": 3},
        {"chunks": 2},
        {"steps": 1},
        {"microbatches": [1, 2]},
    ],
)
def test_arguments_of_another_form_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(options))} is .*; give a"):
        find_recipe("1f1b").formulas(**options)


@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "2bw"])
def test_what_is_stored_holds_up_the_forms_as_it_does_a_run(name: str) -> None:
    """Of up to seven kinds of tasks, all of which may decide how long a step takes."""
    schedule = find_recipe(name)(2, 3)
    always = modes_of("always", schedule.stages)
    stored = add_offload(add_recompute(schedule, always) if name == "2bw" else schedule, always)
    random = Random(0)
    for _ in range(3):
        costs = {kind: random.randint(0, 7) for kind in sorted(stored.kinds)} | {"F": 2, "U": 0}
        ran = stored.simulate(costs, steps=1)
        ratios = [Eq(time(k), Rational(cost, 2) * TF) for k, cost in costs.items() if k != "F"]
        forms = stored.formulas(given=ratios)
        assert forms.makespan.subs(TF, 2) == ran.makespan
        assert forms.bubble_size.subs(TF, 2) == ran.bubble_size


def test_a_task_of_ones_own_has_a_time_of_its_own() -> None:
    make = define_task("X", "extra", run=lambda context: None, cost=1.0, follows="B")
    try:

        def rows(device: int, devices: int, microbatches: int) -> Any:
            yield from (F(i) for i in range(microbatches))
            yield from (B(i) for i in range(microbatches))
            yield make()
            yield U()

        forms = Recipe("extended", rows)(2, 3).formulas()
        assert forms.makespan.subs({TF: 1, TB: 1, TU: 2, time("X"): 5}) == 8 + 5 + 2
        assert forms.makespan.has(Max) is False
    finally:
        del KINDS["X"]


def test_a_notebook_shows_forms_without_a_network() -> None:
    halves = [Eq(time("I"), time("F")), Eq(time("W"), time("F"))]
    text = find_recipe("zb-h1")(2, 3).formulas(given=halves)._repr_html_()
    assert text.startswith("zb-h1, given <math")
    assert text.count("<tr>") == 5 and ">bubble</td><td" in text
    assert "<mfrac><mn>1</mn><mn>10</mn></mfrac>" in text  # (p − 1)/(3m + p − 1)
    assert "script" not in text and "http" not in text


def test_a_pair_has_a_time_of_its_own_in_the_forms() -> None:
    both, known = time("F&B"), (Eq(TI, TF), Eq(TB, TF + TW), TW <= TF)
    for devices in 4, 8:
        schedule = dualpipe(devices, 2 * devices)
        forms = schedule.formulas(given=(*known, both >= TB, both <= TF + TB))
        for f, w, joined in (2, 1, 3), (2, 1, 5), (3, 3, 7):
            costs = {"F": f, "B": f + w, "I": f, "W": w, "F&B": joined, "A": 2, "U": 1}
            numbers = {time(letter): cost for letter, cost in costs.items()}
            assert forms.makespan.subs(numbers) == schedule.simulate(costs).makespan
            free = {**costs, "A": 0, "U": 0}
            assert forms.bubble_size.subs(numbers) == schedule.simulate(free).bubble_size
            assert forms.bubble.subs(numbers) == pytest.approx(schedule.simulate(free).bubble)


def test_dualpipes_published_form_comes_out() -> None:
    both = TF + TB
    given = (Eq(TI, TF), Eq(TB, TF + TW), TW <= TF, Eq(time("F&B"), both))
    forms = dualpipe.formulas(
        given=given,
        devices=(2, 4, 6, 8),
        microbatches=lambda p: (2 * p, 2 * p + 2, 2 * p + 4, 3 * p, 4 * p),
    )
    published = (p / 2 - 1) * (both + TB - 3 * TW)
    assert same(forms.bubble_size, published.subs(TB, TF + TW))
    assert forms.peak_stash == p + 1
