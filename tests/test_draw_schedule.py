"""Pictures of schedules: what stands where, and with which label."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from typing import NamedTuple

import pygraphviz  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.draw.chart import nice_step
from fxpipe.draw.colours import BACKWARD, FAULT, FORWARD, TASKS, UPDATE
from fxpipe.draw.picture import Picture
from fxpipe.draw.schedule import draw_schedule
from fxpipe.schedule import KINDS, B, F, Recipe, Schedule, Task, U
from fxpipe.schedules import gpipe, inference, one_f_one_b


class Box(NamedTuple):
    """A task's box, in points."""

    left: float
    right: float
    row: float
    label: str
    fill: str
    border: str
    style: str


def texts(picture: Picture) -> list[str]:
    return [node["label"] for node in json.loads(picture.pipe("json"))["objects"]]


def boxes(picture: Picture) -> dict[float, list[Box]]:
    """The tasks' boxes by row, from left to right."""
    rows: dict[float, list[Box]] = {}
    for node in json.loads(picture.pipe("json"))["objects"]:
        if not node["name"].startswith("task"):
            continue
        x, y = map(float, node["pos"].split(","))
        half = float(node["width"]) * 36
        box = Box(
            x - half,
            x + half,
            -y,
            node["label"],
            node["fillcolor"],
            node.get("color", ""),
            node["style"],
        )
        rows.setdefault(-y, []).append(box)
    return {row: sorted(found) for row, found in sorted(rows.items())}


RECIPES = st.sampled_from([gpipe, one_f_one_b, inference])


@given(RECIPES, st.integers(1, 5), st.integers(1, 6), st.floats(0.25, 4), st.floats(0.25, 4))
def test_boxes_stand_in_the_order_of_the_row_and_do_not_overlap(
    recipe: Recipe, p: int, m: int, forward: float, backward: float
) -> None:
    schedule = recipe(p, m)
    drawn = boxes(draw_schedule(schedule, costs={"F": forward, "B": backward}))
    assert len(drawn) == p
    for row, found in zip(schedule.rows, drawn.values(), strict=True):
        assert len(found) == len(row)
        assert [box.fill for box in found] == [TASKS[task.kind] for task in row]
        # Graphviz writes positions to a tenth of a point.
        assert all(a.right <= b.left + 0.11 for a, b in pairwise(found))
        for task, box in zip(row, found, strict=True):
            assert box.label in ("", str(Task(task.kind, task.microbatch)))


def test_widths_are_to_scale() -> None:
    (row,) = boxes(draw_schedule(gpipe(1, 1), costs={"F": 1, "B": 3, "U": 2})).values()
    unit = row[0].right - row[0].left
    assert [(b.right - b.left) / unit for b in row] == pytest.approx([1, 3, 2], rel=1e-3)
    assert [box.fill for box in row] == [FORWARD, BACKWARD, UPDATE]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 8), (8, 32)])
def test_every_task_is_labelled_where_a_figure_would_do_so(p: int, m: int) -> None:
    schedule = one_f_one_b(p, m)
    drawn = boxes(draw_schedule(schedule))
    unlabelled = {b.fill for row in drawn.values() for b in row if not b.label}
    assert not unlabelled


@pytest.mark.parametrize(("p", "m"), [(2, 4), (8, 32), (8, 64), (64, 16)])
def test_labels_fit_into_their_boxes(p: int, m: int, capfd: pytest.CaptureFixture[str]) -> None:
    graph = pygraphviz.AGraph(string=draw_schedule(one_f_one_b(p, m)).source)
    graph.has_layout = True
    graph.draw(format="svg")
    assert "too small for label" not in capfd.readouterr().err


def test_a_large_schedule_has_no_labels_in_its_boxes_and_is_quick() -> None:
    begun = time.monotonic()
    picture = draw_schedule(one_f_one_b(64, 256))
    assert picture.pipe("png")
    assert time.monotonic() - begun < 60
    assert not re.search(r"label=[FB]\d", picture.source)
    assert "(labels that do not fit are left out)" in picture.source


def test_a_device_with_several_stages_names_them() -> None:
    rows = ((F(0, 0), F(0, 2), B(0, 2), B(0, 0)), (F(0, 1), B(0, 1)))
    picture = draw_schedule(Schedule("looped", 1, (0, 1, 0), rows))
    first, second = boxes(picture).values()
    assert [box.label for box in first] == ["F0@0", "F0@2", "B0@2", "B0@0"]
    assert [box.label for box in second] == ["F0@1", "B0@1"]
    assert {r"device 0 (stages 0, 2)\l", r"device 1\l"} <= set(texts(picture))


def test_the_title_tells_the_name_the_sizes_and_the_bubble() -> None:
    assert r"1f1b · p = 4 · m = 8 · bubble 27.3%\l" in texts(draw_schedule(one_f_one_b(4, 8)))


def test_a_stuck_schedule_shows_where_it_is_stuck() -> None:
    rows = ((F(0, 0), B(0, 0), U(0)), (B(0, 1), F(0, 1), U(1)))
    schedule = Schedule("stuck", 1, (0, 1), (rows[0], (F(1, 1), *rows[1])))
    picture = draw_schedule(schedule)
    marked = [b.label for row in boxes(picture).values() for b in row if b.border == FAULT]
    assert marked == ["B0", "F1"]
    assert any("STUCK: 6 tasks never run" in text for text in texts(picture))
    assert any("waits for ever" in text for text in texts(picture))


def test_tasks_of_an_earlier_batch_have_a_dashed_border() -> None:
    row = (B(0, 0, batch=-1), F(0, 0))
    picture = draw_schedule(Schedule("window", 1, (0,), (row,), delay=1))
    (drawn,) = boxes(picture).values()
    assert [(box.label, "dashed" in box.style) for box in drawn] == [("B0'", True), ("F0", False)]
    assert r"an earlier batch\l" in texts(picture)


def test_a_name_with_odd_characters_is_shown_as_it_is() -> None:
    name = r'<b>"my\nschedule"</b> & {co}'
    svg = draw_schedule(Schedule(name, 1, (0,), ((F(0, 0),),))).pipe("svg", encoding="utf-8")
    assert "&lt;b&gt;&quot;my\\nschedule&quot;&lt;/b&gt; &amp; {co}" in svg


@pytest.mark.parametrize("rows", [(), ((),), ((Task("?", 0, 0),),), ((F(0),),)])
def test_any_schedule_can_be_drawn(rows: tuple[tuple[Task, ...], ...]) -> None:
    assert draw_schedule(Schedule("odd", 1, (0,), rows)).pipe("svg")


def test_every_kind_of_task_has_a_colour() -> None:
    assert set(KINDS) <= set(TASKS)


@given(st.floats(1e-6, 1e9))
def test_ticks_are_few_and_round(end: float) -> None:
    step = nice_step(end)
    assert 2 <= end / step <= 12.001
    assert f"{step:e}"[0] in "125"
