"""The table of all schedules: what the papers' formulas say, and the best for a memory limit."""

from __future__ import annotations

from html import unescape

import pytest
import torch
from torch import nn

import fxpipe
import fxpipe.schedules as library
from fxpipe.errors import InputError
from fxpipe.ir.recipe import RECIPES


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
        row = rows[name]
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


def test_the_picture_has_a_bar_for_each_schedule(found: fxpipe.Comparison) -> None:
    svg = unescape(found.draw().pipe("svg", encoding="utf-8"))
    for row in found.rows:
        assert f">{row.name}<" in svg
    assert "best" in svg
    with pytest.raises(InputError, match="no schedule is for so many"):
        fxpipe.Comparison(1, 1, ()).draw()


@pytest.mark.models
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_a_pipe_that_is_cut_evenly_is_predicted_as_it_predicts_itself(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)))
    x = torch.randn(1024, 32)
    with fxpipe.compile(
        model,
        2,
        microbatches=8,
        schedule=schedule,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters()),
        partition=["4"],
        example=((x,), {"target": x}),
    ) as pipe:
        found = fxpipe.compare(pipe, costs={"F": 1.0, "B": 2.0, "U": 0.0}, memory=1.0)
        (row,) = (row for row in found.rows if row.name == schedule)
        own = pipe.simulate({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "U": 0.0})
        assert (row.time, row.bubble) == pytest.approx((own.makespan, own.bubble))
        # what crosses and what graphs need while they run are left out, and shares are rounded
        # such as the gradients that a half of a backward makes beside what it has not released yet
        least = 0.84 if schedule == "zb-h1" else 0.9
        assert least <= row.memory / max(each.peak for each in own.memory) <= 1.15
        assert found.best is None
        assert "KiB" in str(found)
        assert found.measured
        assert {row.name for row in found.rows} == {*RECIPES} - {"inference"}


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


def test_schedules_of_tasks_that_take_no_time_have_a_picture() -> None:
    assert fxpipe.compare(costs={"F": 0, "B": 0, "U": 0}).draw()._repr_svg_()
