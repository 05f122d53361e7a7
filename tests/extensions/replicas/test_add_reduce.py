"""Where sums of gradients over replicas are put into a schedule, and what they hide behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpipe.extensions.clipping.opcodes import add_clip
from fxpipe.extensions.overlapping.delays import end_with_flush
from fxpipe.extensions.replicas.lowering import add_reduce
from fxpipe.ir.recipe import RECIPES
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task
from tests.helpers.plans import in_turn

TRAINING = sorted(RECIPES.keys() - {"inference"})
COUNTS = [(1, 1), (1, 3), (2, 2), (2, 5), (3, 3), (3, 7), (4, 4), (5, 6)]


@pytest.mark.parametrize("name", TRAINING)
def test_each_stage_sums_right_after_its_last_backward(name: str) -> None:
    for devices, microbatches in COUNTS:
        schedule = RECIPES[name](devices, microbatches)
        bare = tuple(tuple(task for task in row if task.kind != "A") for row in schedule.rows)
        reducing = add_reduce(replace(schedule, rows=bare)).verify()
        for row in reducing.rows:
            for at, task in enumerate(row):
                if task.kind == "A":
                    before = row[at - 1]
                    own = [t.microbatch for t in row if (t.kind, t.stage) == ("F", task.stage)]
                    assert before.kind in "BW" and before.microbatch == own[-1]
                    assert own[-1] == microbatches - 1 or schedule.copies
                    assert (before.stage, before.batch) == (task.stage, task.batch)
        sums = sorted(str(t) for row in reducing.rows for t in row if t.kind == "A" and not t.batch)
        if not schedule.overlaps:
            parts = {
                (t.stage, d) for d, row in enumerate(schedule.rows) for t in row if t.kind == "F"
            }
            assert sums == sorted(str(Task("A", None, stage)) for stage, _ in parts)
        assert others(reducing) == others(schedule)


def others(schedule: Schedule) -> list[list[Task]]:
    """What comes for each micro-batch, in order."""
    return [[task for task in row if task.microbatch is not None] for row in schedule.rows]


def test_a_forward_alone_and_what_an_author_has_placed_are_left_as_they_are() -> None:
    inference, own = RECIPES["inference"](2, 2), add_reduce(RECIPES["gpipe"](2, 2))
    assert add_reduce(inference) == inference
    late = replace(own, rows=tuple((*row[:-2], row[-2], row[-1]) for row in own.rows))
    assert add_reduce(late) is late


def test_clips_come_behind_the_sums() -> None:
    flush = add_clip(add_reduce(RECIPES["1f1b"](2, 2))).verify()
    assert [" ".join(map(str, row)).split("B1")[1] for row in flush.rows] == [
        "@0 A@0 C@0 U@0",
        "@1 A@1 C@1 U@1",
    ]
    window = add_clip(add_reduce(RECIPES["2bw"](2, 2))).verify()
    assert " ".join(str(replace(task, stage=None)) for task in window.rows[0]) == (
        "F0 B1' A' F1 B0 C' U'"
    )


def test_a_batch_that_is_too_short_to_overlap_sums_before_its_flush() -> None:
    schedule = add_reduce(end_with_flush(RECIPES["2bw"](2, 1)))
    assert [str(task) for task in schedule.verify().rows[0]] == ["F0@0", "B0@0", "A@0", "U@0"]


def test_the_sums_of_one_device_with_a_delay_hide_behind_a_batch() -> None:
    row = add_reduce(RECIPES["2bw"](1, 2)).verify().rows[0]
    assert " ".join(map(str, row)) == "U''@0 F0@0 B0@0 F1@0 B1@0 A@0"


def between(schedule: Schedule) -> int:
    """The fewest forwards and backwards that a device runs between a sum and its update."""
    found = []
    for window in schedule.rows:
        steps = in_turn(window, 8, schedule.depth)
        row = [replace(task, batch=step + task.batch) for step, task in steps]
        for at, task in enumerate(row):
            if task.kind == "A" and task.batch == 4:
                end = row.index(Task("U", None, task.stage, 4))
                found.append(sum(other.kind in "FB" for other in row[at:end]))
    return min(found)


@pytest.mark.parametrize("name", ["2bw", "1f1b-async"])
def test_where_batches_overlap_the_sums_hide_behind_a_window(name: str) -> None:
    for devices, microbatches in ((2, 2), (3, 4), (4, 4)):
        schedule = RECIPES[name](devices, microbatches)
        tasks = between(add_reduce(schedule))
        assert tasks == 2 * (microbatches - devices + 1)


@pytest.mark.parametrize("name", ["2bw", "pipedream", "1f1b-async"])
def test_no_more_versions_are_needed_where_updates_come_late(name: str) -> None:
    for devices, microbatches in COUNTS:
        schedule = RECIPES[name](devices, max(devices, microbatches))
        late, soon = add_reduce(schedule).versions(), schedule.versions()
        assert max(late.live) <= max(schedule.delays) + 1
        assert late.delays == soon.delays
