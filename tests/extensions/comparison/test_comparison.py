"""The table of all schedules: what the papers' formulas say, and the best for a memory limit."""

from __future__ import annotations

import pytest

import fxpipe
import fxpipe.schedules as library
from fxpipe.errors import InputError
from fxpipe.ir.recipe import find_recipe


@pytest.fixture(scope="module", params=[(4, 8), (3, 7)])
def found(request: pytest.FixtureRequest) -> fxpipe.Comparison:
    p, m = request.param
    return fxpipe.compare(devices=p, microbatches=m, costs={"F": 1, "B": 2, "U": 0})


@pytest.mark.smoke
def test_the_rows_are_what_the_formulas_say(found: fxpipe.Comparison) -> None:
    p, m = found.devices, found.microbatches
    rows = {row.name: row for row in found.rows}
    flushed = 3 * (m + p - 1), (p - 1) / (m + p - 1)
    halves = 3 * m + p - 1, (p - 1) / (3 * m + p - 1)
    expected = {  # time, bubble, memory and versions
        "naive": (3 * m * p, (p - 1) / p, 1, 1),
        "gpipe": (*flushed, m, 1),
        "1f1b": (*flushed, p, 1),
        "zb-h1": (*halves, p, 1),
        "zb-h2": (*halves, 2 * p - 1, 1),
        "zb-v": (3 * m + (p - 1) / 2, (p - 1) / (6 * m + p - 1), p, 1),
        "dualpipe-v": (3 * m + (p - 1) / 2, (p - 1) / (6 * m + p - 1), p + 0.5, 1),
        "2bw": (3 * m, 0, p, 2),
        "1f1b-async": (3 * m, 0, p, 2),
    }
    if m % p == 0:
        looped = 3 * m + 3 * (p - 1) / 2, (p - 1) / (2 * m + p - 1)
        expected["interleaved-1f1b"] = (*looped, p + (p - 1) / 2, 1)
        expected["looped-bfs"] = (*looped, m, 1)
    for name, (time, bubble, memory, versions) in expected.items():
        row = rows[find_recipe(name).name]
        assert row.time == pytest.approx(time), name
        assert row.bubble == pytest.approx(bubble, abs=1e-9), name
        assert (row.memory, row.versions) == (memory, versions), name
    names = {getattr(library, name).name for name in library.__all__}
    assert rows.keys() | found.left_out.keys() == names - {"inference"}


def test_the_best_for_a_limit_is_the_fastest_with_one_version_that_keeps_it(
    found: fxpipe.Comparison,
) -> None:
    for limit in (0.5, 1, 2.5, 3, 4, 7, 100, None):
        asked = fxpipe.Comparison(4, 8, found.rows, limit=limit)
        keeps = [r for r in found.rows if limit is None or r.memory <= limit]
        times = [r.time for r in keeps if r.versions == 1]
        assert (asked.best is None) == (not times)
        if asked.best is not None:
            assert asked.best.time == min(times)
            assert asked.best in keeps
        assert str(asked).count(" best") == bool(times)
        assert str(asked).count(f"over {limit}") == len(found.rows) - len(keeps)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InputError, match="costs has no kind of task 'X'"):
        fxpipe.compare(costs={"X": 1})
    with pytest.raises(InputError, match=r"costs\['F'\] is 'long'; a task takes a time"):
        fxpipe.compare(costs={"F": "long"})  # type: ignore[arg-type]
    for wrong in (0, 2.5, "2", True):
        for name in ("devices", "microbatches"):
            with pytest.raises(InputError, match=f"{name} is {wrong!r}; give a whole number"):
                fxpipe.compare(**{name: wrong})  # type: ignore[arg-type]
    for nothing in (0, -3.0, float("nan")):
        with pytest.raises(InputError, match=f"memory is {nothing:g}; give"):
            fxpipe.compare(memory=nothing)
