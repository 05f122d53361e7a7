"""The schedule of a pipe is drawn with the times that the pipe has measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.extensions.draw.picture import Picture
from fxpipe.schedules import one_f_one_b

pytestmark = pytest.mark.models

X, Y = torch.ones(4, 6), torch.zeros(4, 2)


def compiled(**options: Any) -> fxpipe.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2))
    return fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=mse_loss, **options)


def times(picture: Picture) -> dict[str, list[float]]:
    """Each task, as tooltips call it → its start and end."""
    nodes = json.loads(picture.pipe("json"))["objects"]
    told = [node["tooltip"].split(": ") for node in nodes if node["name"].startswith("task")]
    return {task: [float(time) for time in span.split(" to ")] for task, span in told}


def shown(picture: Picture) -> str:
    """The text below the axis."""
    labels = [node["label"] for node in json.loads(picture.pipe("json"))["objects"]]
    (caption,) = (text for text in labels if ", with F = " in text)
    return str(caption)


def test_tasks_take_what_was_measured_at_the_cut_and_later_what_a_profile_took() -> None:
    with compiled(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)) as pipe:
        pipe.step(X, target=Y)
        schedule, costs = pipe.schedule, [stage.costs for stage in pipe.plan.stages]
        assert costs[0] and costs[1]
        first, second = (1e3 * cost.forward for cost in costs if cost)
        for stage, cost in enumerate(costs):
            assert cost and schedule.seconds["B", stage] == cost.backward
        found = times(schedule.draw())
        assert found["forward, micro-batch 0, stage 0"] == pytest.approx([0, first], rel=1e-4)
        expected = pytest.approx([first, first + second], rel=1e-4)
        assert found["forward, micro-batch 0, stage 1"] == expected
        assert shown(schedule.draw()).startswith("milliseconds, with F = ")
        measured = pipe.profile(X, target=Y)
        assert pipe.schedule.seconds.items() >= measured.costs.items()
        given = pipe.schedule.draw(costs={"F": 1, "B": 3, "U": 0})
        assert shown(given) == r"time, with F = 1, B = 3, U = 0\l"


def test_times_are_no_part_of_what_a_schedule_is() -> None:
    own = one_f_one_b(2, 2)
    with compiled(schedule=own) as pipe:
        pipe.step(X, target=Y)
        schedule = pipe.schedule
        assert schedule.seconds and not own.seconds
        assert fxpipe.Schedule.parse(str(schedule)) == schedule
        assert hash(fxpipe.Schedule.parse(str(schedule))) == hash(schedule)
    with compiled(schedule=schedule, partition=["2"]) as pipe:
        pipe.step(X, target=Y)
        assert not pipe.schedule.seconds  # a cut by names has measured nothing
        assert shown(pipe.schedule.draw()).startswith("time, with F = 1, B = 2")
        pipe.simulate()
        assert pipe.schedule.seconds
