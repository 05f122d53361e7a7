"""Pairs, sums, clips and tasks of one's own in grids and pictures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fxpipe.extensions.clipping.opcodes import add_clip
from fxpipe.extensions.own_tasks.define import define_task
from fxpipe.extensions.simulator.chain import chain_program
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import F
from fxpipe.schedules.one_f_one_b import seq1f1b
from tests.extensions.own_tasks.test_own_tasks import with_task
from tests.schedules.test_pairs import paired


def test_a_grid_and_a_picture_show_pairs() -> None:
    schedule, costs = paired(2, 3), {"F": 1, "B": 2, "F&B": 2, "U": 0}
    assert schedule.grid(costs=costs).splitlines()[1:] == [
        "0: F0 F1 F2 .  .  B0--- B1--- B2---",
        "1: .  F0 F1 F2&B0 B1--- B2--- .  .",
    ]
    alone = replace(schedule, paired=frozenset())
    drawn, apart = (s.draw(costs={"U": 0}).source for s in (schedule, alone))
    assert "a pair, which runs together" in drawn
    assert "a pair" not in apart
    # a box around the pair, one of the legend, and its text
    assert drawn.count("pos=") == apart.count("pos=") + 3


def test_a_schedule_that_leaves_its_sums_out_is_drawn_and_told_with_them() -> None:
    """As compile runs it: each device gets an A right after its last backward of a stage."""
    text = (
        "schedule shared stages=2 microbatches=2 delay=0\nplace 0 | 1 | +0\n"
        "0: F0 B0 {}U\n1: F0 B0 F1 B1 {}U\n2: F1 B1{}\n"
    )
    short = Schedule.parse(text.format("", "", "")).verify()
    whole = Schedule.parse(text.format("A ", "A ", " A")).verify()
    assert short.grid() == whole.grid()
    assert short.simulate().makespan == whole.simulate().makespan


@pytest.mark.parametrize("name", ["1f1b", "2bw"])
def test_clips_are_drawn(name: str) -> None:
    schedule = add_clip(find_recipe(name)(3, 3))
    assert "C" in schedule.kinds
    assert schedule.draw().pipe("svg")
    assert chain_program(schedule).draw().pipe("svg")


def test_a_task_of_ones_own_is_drawn() -> None:
    norm = define_task("N", "gradient norm", run=lambda context: None, cost=0.1, follows="BW")
    schedule = with_task(norm)(2, 2)
    assert "N" in schedule.kinds
    assert schedule.draw().pipe("svg")
    assert chain_program(schedule).draw().pipe("svg")


@pytest.mark.parametrize("stages", [1, 2])
def test_slices_are_named_by_slice_and_by_the_stage_of_the_model(stages: int) -> None:
    """With two stages of the model a device, of which stage 2 is on device 0, too."""
    schedule = seq1f1b(2)(2, 2)
    if stages == 2:
        forwards = [F(i, stage) for i in range(2) for stage in range(8)]
        rows = tuple(tuple(x for x in forwards if (x.stage or 0) % 2 == d) for d in range(2))
        schedule = Schedule("sliced", 2, (0, 1, 0, 1) * 2, rows, slices=2).verify()
    at = {stage: f"@{stage}" if stages == 2 else "" for stage in range(4)}
    row = schedule.stages // 2
    pictures = [schedule.draw(), schedule.simulate().draw()]
    assert pictures[0].source.count("device 0 (stages 0, 2)") == stages - 1
    for picture in pictures:
        nodes = json.loads(picture.pipe("json"))["objects"]
        told = [node for node in nodes if node["name"].startswith("task")]
        tasks = [task for own in schedule.rows for task in own if task.kind != "U"]
        for task, node in zip(tasks, [n for n in told if n["label"][0] != "U"], strict=True):
            assert task.stage is not None
            stage, part = task.stage % row, task.stage // row
            assert node["label"] == rf"{task.kind}{task.microbatch}\n{at[stage]}:{part}"
            assert f"stage {stage}, slice {part}:" in node["tooltip"]
        assert "lighter: later slices" in picture.source
    first = [word for word in schedule.grid().splitlines()[1].split() if word != "."]
    assert first[1:3] == [f"F0{at[0]}:0", "F0@2:0" if stages == 2 else "F0:1"]
