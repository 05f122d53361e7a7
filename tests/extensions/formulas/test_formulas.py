"""Closed forms are what the simulator finds, also where they were not checked, and what the page of
schedules says."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpipe
from fxpipe import B, F, U
from fxpipe.extensions.cli import main
from fxpipe.extensions.formulas.formulas import Formulas, M, P, T, V, formulas
from fxpipe.extensions.simulator import simulate_schedule
from fxpipe.ir.recipe import find_recipe, round_robin
from tests.helpers.profiles import DEEP, deep

PAGE = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text()
ROWS = {
    cells[0].strip("` "): cells
    for line in PAGE.splitlines()
    if line.startswith("| `") and len(cells := line.strip("|").split("|")) == 5
}
"""Schedule → its row on the page of schedules: name, bubble, in between, micro-batches kept, what
it is for."""


def _read(text: str) -> Any:
    """An expression of the page's table, where numbers and letters stand side by side for products.
    A condition after a comma is left out."""
    text = text.split(",")[0].replace("−", "-").replace("½", "1/2").replace("→", "").strip()
    text = re.sub(r"(\d|\bv)\s*(?=[mpv(])", r"\1*", text)
    return sympy.sympify(text, {"p": P, "m": M, "v": V})


def _equal_times(form: Any) -> Any:
    """A form where a forward and each half of a backward take T, and a whole backward 2 T."""
    times = {x: 2 * T if x.name == "T_B" else T for x in form.free_symbols if "T_" in x.name}
    return form.subs(times)


@cache
def _found(name: str, most: int) -> Formulas:
    return formulas(find_recipe(name), most=most)


@pytest.mark.parametrize(
    "name",
    [
        *("naive", "1f1b", "zb-h1"),
        *deep("gpipe", "zb-h2", "zb-v", "looped-bfs", "interleaved-1f1b"),
    ],
)
def test_the_table_of_schedules_has_the_closed_forms(name: str) -> None:
    found = _found(name, {"zb-h2": 8, "zb-h1": 5}.get(name, 6 if DEEP else 5))
    _, bubble, _, kept, _ = ROWS[name]
    assert sympy.simplify(_equal_times(found.bubble.form) - _read(bubble)) == 0
    assert sympy.simplify(found.kept.form - _read(kept)) == 0


@settings(max_examples=10, deadline=None)
@given(st.integers(8, 11), st.integers(12, 26), st.tuples(*3 * [st.integers(1, 9)]))
def test_a_form_is_the_simulators_beyond_where_it_was_checked(
    devices: int, microbatches: int, times: tuple[int, int, int]
) -> None:
    found, costs = _found("zb-h1", 5), dict(zip("FIW", times, strict=True))
    values: dict[Any, int] = {P: devices, M: microbatches}
    values |= {sympy.Symbol(f"T_{kind}", positive=True): time for kind, time in costs.items()}
    if not bool(found.makespan.where.subs(values)):
        return
    schedule = find_recipe("zb-h1")(devices, microbatches)
    simulated = simulate_schedule(schedule, {**costs, "U": 0})
    assert float(found.makespan.form.subs(values)) == simulated.through
    assert float(found.bubble.form.subs(values)) == pytest.approx(simulated.bubble, abs=1e-12)
    assert found.kept.form.subs(values) == max(schedule.kept().devices)


@pytest.mark.deep
def test_stages_a_device_are_in_the_form_where_there_may_be_any_number() -> None:
    found = formulas(find_recipe("looped-bfs"), most=5)
    schedule = find_recipe("looped-bfs").placed(round_robin(5))(6, 12)
    expected = simulate_schedule(schedule, {"F": 1, "B": 2, "U": 0}).bubble
    made = found.bubble.form.subs({P: 6, M: 12, V: 5})
    assert float(made) == pytest.approx(expected, abs=1e-12)


def test_a_schedule_without_a_form_says_why() -> None:
    def tasks(device: int, devices: int, microbatches: int) -> Any:
        """Micro-batches whose numbers are squares are trained one by one, the rest together."""
        alone = [i for i in range(microbatches) if int(i**0.5) ** 2 == i]
        rest = [i for i in range(microbatches) if i not in alone]
        for i in alone:
            yield F(i)
            yield B(i)
        yield from map(F, rest)
        yield from map(B, rest)
        yield U()

    found = formulas(fxpipe.Recipe("squares", tasks), most=5)
    assert found.makespan.form is None and found.bubble.form is None
    assert "no sum of products" in found.makespan.why
    assert str(found.makespan) == f"none: {found.makespan.why}"


def test_too_few_devices_to_tell_are_refused() -> None:
    with pytest.raises(fxpipe.InputError, match="most is 4"):
        find_recipe("1f1b").formulas(most=4)


def test_the_command_line_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "gpipe", "--formulas"]) == 0
    makespan, bubble, kept = capsys.readouterr().out.splitlines()
    assert makespan.startswith("makespan  (T_B + T_F)*(m + p - 1) (checked for ")
    assert bubble.startswith("bubble    (p - 1)/(m + p - 1) (checked for ")
    assert kept.startswith("kept      m (checked for ")
