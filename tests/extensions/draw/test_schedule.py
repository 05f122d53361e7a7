"""Pictures of schedules: what stands where, and with which label."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import groupby, pairwise
from typing import NamedTuple

import pygraphviz  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import InputError, VerificationError
from fxpipe.extensions.draw.chart import nice_step
from fxpipe.extensions.draw.picture import BACKWARD, FAULT, FORWARD, TASKS, UPDATE, Picture, tint
from fxpipe.extensions.draw.schedule import draw_schedule
from fxpipe.extensions.draw.timeline import steps_to_show
from fxpipe.ir.recipe import Recipe, find_recipe, round_robin
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, B, F, Task, U
from fxpipe.schedules import gpipe, inference, one_f_one_b, pipedream


class Box(NamedTuple):
    """A task's box, in points."""

    left: float
    right: float
    row: float
    name: str
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
            node["name"].partition("at")[0],
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
    drawn = [*boxes(draw_schedule(schedule, costs={"F": forward, "B": backward})).values()]
    assert len(drawn) % p == 0  # p rows in each line
    # Graphviz writes positions to a tenth of a point.
    assert all(a.right <= b.left + 0.11 for row in drawn for a, b in pairwise(row))
    for device, row in enumerate(schedule.rows):
        boxes_of = [box for line in drawn[device::p] for box in line]
        # a task that is cut at the end of a line goes on at the beginning of the next
        found = [[*parts] for _, parts in groupby(boxes_of, key=lambda box: box.name)]
        assert len(found) == len({parts[0].name for parts in found}) == len(row)
        for task, parts in zip(row, found, strict=True):
            assert {box.fill for box in parts} == {TASKS[task.kind]}
            told = [box.label for box in parts if box.label]
            assert told in ([], [str(Task(task.kind, task.microbatch))])


def test_widths_are_to_scale() -> None:
    (row,) = boxes(draw_schedule(gpipe(1, 1), costs={"F": 1, "B": 3, "U": 2})).values()
    unit = row[0].right - row[0].left
    assert [(b.right - b.left) / unit for b in row] == pytest.approx([1, 3, 2], rel=1e-3)
    assert [box.fill for box in row] == [FORWARD, BACKWARD, UPDATE]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 8)])
def test_every_task_is_labelled_where_a_figure_would_do_so(p: int, m: int) -> None:
    schedule = one_f_one_b(p, m)
    drawn = boxes(draw_schedule(schedule))
    unlabelled = {b.fill for row in drawn.values() for b in row if not b.label}
    assert not unlabelled


@pytest.mark.parametrize(("recipe", "lines"), [("1f1b", 3), ("zb-v", 3)])
def test_a_wide_schedule_is_wrapped_and_every_task_labelled_once(recipe: str, lines: int) -> None:
    schedule = find_recipe(recipe)(8, 32)
    picture = draw_schedule(schedule)
    assert picture.source.count("device 3") == lines
    parts: dict[str, list[tuple[float, str]]] = {}
    for node in json.loads(picture.pipe("json"))["objects"]:
        if node["name"].startswith("task"):
            number = node["name"].partition("at")[0]
            parts.setdefault(number, []).append((float(node["width"]), node["label"]))
    tasks = [task for row in schedule.rows for task in row]
    assert len(parts) == len(tasks)
    assert sum(len(found) > 1 for found in parts.values()) > 8  # cut at the ends of lines
    widths: dict[str, set[float]] = {}
    for number, task in enumerate(tasks):
        found = parts[f"task{number}"]
        told = [label.split("\\n")[0] for _, label in found if label]
        assert told == [str(replace(task, stage=None))]
        widths.setdefault(task.kind, set()).add(round(sum(wide for wide, _ in found), 1))
    assert all(max(each) - min(each) < 0.11 for each in widths.values())  # the parts add up
    (left, _, right, _) = map(float, json.loads(picture.pipe("json"))["bb"].split(","))
    assert right - left < 1300


def test_tasks_that_take_no_time_are_drawn_in_one_line() -> None:
    """An A takes no time here, and so does an update at the end of a line."""
    schedule = find_recipe("1f1b")(8, 32)
    assert draw_schedule(schedule, costs={"U": 0}).pipe("png")


def test_stages_of_a_device_are_evenly_lighter_and_copies_are_told() -> None:
    picture = draw_schedule(find_recipe("gpipe").placed(round_robin(4))(2, 2))
    drawn = boxes(picture)
    fills = {b.label.partition("@")[2]: b.fill for b in drawn[min(drawn)] if b.label[0] == "F"}
    light = [int(fills[stage][1:3], 16) for stage in ("0", "2", "4", "6")]
    steps = [b - a for a, b in pairwise(light)]
    assert min(steps) > 20 and max(steps) - min(steps) <= 1
    assert "lighter: later stages of a device; @: the stage" in picture.source
    copied = draw_schedule(find_recipe("chimera")(4, 8))
    assert "lighter: copies of stages; @: the stage" in copied.source
    first = boxes(copied)
    forwards = {b.label: b.fill for b in first[min(first)] if b.label[:1] == "F"}
    assert forwards[r"F0\n@0"] == forwards[r"F2\n@0"] == FORWARD
    assert forwards[r"F1\n@3"] == forwards[r"F3\n@3"] == tint(FORWARD, 1, 2)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (8, 64), (64, 4)])
def test_labels_fit_into_their_boxes(p: int, m: int, capfd: pytest.CaptureFixture[str]) -> None:
    graph = pygraphviz.AGraph(string=draw_schedule(one_f_one_b(p, m)).source)
    graph.has_layout = True
    graph.draw(format="svg")
    assert "too small for label" not in capfd.readouterr().err


def test_a_large_schedule_has_no_labels_in_its_boxes() -> None:
    picture = draw_schedule(one_f_one_b(32, 128))
    assert picture.pipe("png")
    assert not re.search(r"label=[FB]\d", picture.source)
    assert "(labels that do not fit are left out)" in picture.source


def test_a_device_with_several_stages_names_them() -> None:
    rows = ((F(0, 0), F(0, 2), B(0, 2), B(0, 0), U(0), U(2)), (F(0, 1), B(0, 1), U(1)))
    picture = draw_schedule(Schedule("looped", 1, (0, 1, 0), rows), costs={"U": 0})
    first, second = boxes(picture).values()
    assert [box.label for box in first] == [r"F0\n@0", r"F0\n@2", r"B0\n@2", r"B0\n@0"]
    assert [box.label for box in second] == [r"F0\n@1", r"B0\n@1"]
    # The later stage of a device is lighter.
    assert first[0].fill == FORWARD < first[1].fill
    assert first[3].fill == BACKWARD < first[2].fill
    assert {r"device 0 (stages 0, 2)\l", r"device 1\l"} <= set(texts(picture))


def test_the_title_tells_the_name_the_sizes_and_the_bubble() -> None:
    assert r"1f1b · p = 4 · m = 8 · bubble 27.3%\l" in texts(draw_schedule(one_f_one_b(4, 8)))


def test_a_stuck_schedule_shows_where_it_is_stuck() -> None:
    rows = ((F(0, 0), B(0, 0), U(0)), (B(0, 1), F(0, 1), U(1)))
    schedule = Schedule("stuck", 1, (0, 1), (rows[0], (F(1, 1), *rows[1])))
    picture = draw_schedule(schedule)
    first, second = boxes(picture).values()
    # The device at fault has solid red, the one that waits for it dashed red.
    assert [(b.label, b.border == FAULT, "dashed" in b.style) for b in first] == [
        ("F0", False, False),
        ("B0", True, True),
        ("U", False, False),
    ]
    assert [b.label for b in second] == ["F1", "B0", "F0", "U"]
    assert any("STUCK: 5 tasks never run" in text for text in texts(picture))
    assert {r"waits for ever\l", r"never runs\l", r"at fault\l"} <= set(texts(picture))


def broken() -> Schedule:
    """Without a deadlock: a task twice, one on the wrong device, and an update that is missing."""
    rows = ((F(0, 0), F(0, 0), B(0, 0), U(0)), (F(0, 1), B(0, 1), U(0)))
    return Schedule("broken", 1, (0, 1), rows)


def test_every_fault_is_marked_in_red_and_listed_below() -> None:
    with pytest.raises(VerificationError) as caught:
        broken().verify()
    faults = caught.value.faults
    picture = broken().draw()
    assert "STUCK" not in picture.source
    shown = {text.removesuffix(r"\l") for text in texts(picture)}
    assert {f"{number}. {fault}" for number, fault in enumerate(faults, start=1)} <= shown
    # No box of a picture with so few tasks is left out, so positions count its boxes.
    red = {
        (device, position)
        for device, row in enumerate(boxes(picture).values())
        for position, box in enumerate(row)
        if box.border == FAULT
    }
    placed = {(f.device, f.position) for f in faults if f.position is not None}
    assert red == placed == {(0, 1), (1, 2)}
    assert "broken · p = 2 · m = 1 · 3 faults" in shown
    # the third has no position: the label of its device is red
    assert [(f.device, f.position) for f in faults][2] == (1, None)
    labels = {n["label"]: n.get("fontcolor") for n in json.loads(picture.pipe("json"))["objects"]}
    assert labels[r"device 1\l"] == FAULT != labels[r"device 0\l"]


def test_faults_beyond_a_page_are_counted() -> None:
    rows = tuple(row[:-1] for row in one_f_one_b(24, 1).rows)
    picture = draw_schedule(Schedule("many", 1, tuple(range(24)), rows))
    assert r"… and 8 more\l" in texts(picture)


def window() -> Schedule:
    row = (F(0, 0), B(1, 0, batch=-1), U(0, batch=-1), F(1, 0), B(0, 0))
    return Schedule("window", 2, (0,), (row,), delay=1)


def test_one_window_marks_tasks_of_the_batch_before() -> None:
    late = replace(window(), rows=((*window().rows[0], F(2, 0)),))
    (row,) = boxes(picture := draw_schedule(late)).values()
    assert [b.label for b in row] == ["F0", "B1'", "U'", "F1", "B0", "F2"]
    assert ["dashed" in b.style for b in row] == [False, True, True, False, False, False]
    assert r"the batch before\l" in texts(picture)


def test_steps_in_a_row_tell_batches_and_weight_versions() -> None:
    picture = draw_schedule(window(), steps=3, costs={"U": 2})
    (row,) = boxes(picture).values()
    assert [box.label.split(r"\n") for box in row] == [
        [name, *tags.split()]
        for line in (
            "F0:b0 v0, F1:b0 v0, B0:b0 v0",
            "F0:b1 v0, B1:b0 v0, U:b0 →v1, F1:b1 v0, B0:b1 v0",
            "F0:b2 v1, B1:b1 v0, U:b1 →v2, F1:b2 v1, B0:b2 v1",
            "B1:b2 v1, U:b2 →v3",
        )
        for name, tags in (item.split(":") for item in line.split(", "))
    ]
    batches = [box.label.split(r"\n")[1] for box in row]
    looks = {
        batch: (box.border, box.style)
        for batch, box in zip(batches, row, strict=True)
        if box.label[0] != "U"
    }
    assert len(looks) == len(set(looks.values())) == 3
    assert {r"batch 2\l", r"v: the version of the weights\l"} <= set(texts(picture))
    assert r"window · p = 1 · m = 2 · delay = 1 · 3 steps and flush · bubble 0.0%\l" in texts(
        picture
    )


def test_each_micro_batch_tells_the_version_that_it_reads() -> None:
    picture = draw_schedule(window(), steps=3, costs={"U": 2})
    (row,) = boxes(picture).values()
    assert [box.label.replace(r"\n", ":") for box in row] == [
        item.replace(" ", ":")
        for line in (
            "F0:b0 v0, F1:b0 v0, B0:b0 v0",
            "F0:b1 v0, B1:b0 v0, U:b0 →v1, F1:b1 v0, B0:b1 v0",
            "F0:b2 v1, B1:b1 v0, U:b1 →v2, F1:b2 v1, B0:b2 v1",
            "B1:b2 v1, U:b2 →v3",
        )
        for item in line.split(", ")
    ]
    both = draw_schedule(pipedream(2, 1))
    assert any("delay = 0 to 1" in text for text in texts(both))


def test_the_default_shows_a_step_between_others() -> None:
    assert [steps_to_show(s) for s in (one_f_one_b(2, 2), window())] == [1, 4]


def test_a_count_of_steps_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match="steps is 0"):
        one_f_one_b(2, 2).draw(steps=0)


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
