"""Schedules in torch's CSV: they are the published ones, and train as the plain loop does."""

from __future__ import annotations

import copy
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpipe
from examples import plain
from examples.torch_csv import from_csv
from fxpipe.errors import FxpipeError
from fxpipe.ir.recipe import Recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.schedules import gpipe, interleaved_one_f_one_b, one_f_one_b, zb_h1

FOLDER = Path(__file__).parents[1] / "published"

FILES = ["torch-dualpipev_4rank_10mb.csv", "torch-zb1p_2rank_2stagep_compute.csv"]


def lines(name: str) -> list[str]:
    return [x for x in (FOLDER / name).read_text().splitlines() if not x.startswith("#")]


def block(name: str) -> str:
    """A schedule of the published ones, which torch's code has made, with its comments."""
    every = (FOLDER / "schedules.txt").read_text().split("\n\n")
    return next(text for text in every if f"schedule {name} " in text)


def test_the_csv_of_dualpipev_is_what_torchs_code_makes_with_its_pairs() -> None:
    text = block("torch-dualpipev-p4-m10")
    made, schedule = Schedule.parse(text), from_csv(lines(FILES[0]), "torch-dualpipev-p4-m10")
    assert (schedule.rows, schedule.placement) == (made.rows, made.placement)
    pairs = {
        pair.replace("+", "&")
        for line in text.splitlines()
        if line.startswith("# overlapped pairs")
        for pair in line.partition(": ")[2].split()
    }
    assert pairs == {word for word in str(schedule).split() if "&" in word}


def test_a_whole_backward_with_a_weight_gradient_behind_it_is_its_first_half() -> None:
    schedule = from_csv(lines(FILES[1]))
    for row, line in zip(schedule.rows, lines(FILES[1]), strict=True):
        cells = [cell.replace("B", "I") for cell in line.split(",") if cell]
        tasks = [f"{t.stage}{t.kind}{t.microbatch}" for t in row if t.kind != "U"]
        assert tasks == cells


@pytest.mark.parametrize(
    ("recipe", "devices", "microbatches"),
    [(gpipe, 3, 4), (one_f_one_b, 1, 2), (interleaved_one_f_one_b, 2, 4), (zb_h1, 3, 5)],
)
def test_what_is_written_in_torchs_form_reads_back(
    recipe: Recipe, devices: int, microbatches: int
) -> None:
    schedule = recipe(devices, microbatches)
    rows = [
        [f"{t.stage}{t.kind}{t.microbatch}" for t in row if t.kind in "FBIW"]
        for row in schedule.rows
    ]
    # what torch's own lowering adds is derived anew
    rows[0] = ["0UNSHARD", *rows[0], "0SEND_F0", "0REDUCE_GRAD"]
    read = from_csv([",".join(row) for row in rows])
    assert read.placement == schedule.placement
    for ours, theirs in zip_longest(schedule.rows, read.rows):
        assert [t for t in ours if t.kind != "U"] == [t for t in theirs if t.kind != "U"]


@pytest.mark.models
@pytest.mark.parametrize("name", FILES)
def test_a_schedule_read_from_csv_trains_like_the_plain_loop(name: str) -> None:
    schedule = from_csv(lines(name))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(schedule.stages))).double()
    expected = copy.deepcopy(model)
    x, y = torch.randn(2, 2 * schedule.microbatches, 4, dtype=torch.float64)
    mse = nn.functional.mse_loss
    beside = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    with fxpipe.compile(
        model,
        ["cpu"] * schedule.devices,
        schedule=schedule,
        partition=[str(layer) for layer in range(1, schedule.stages)],
        loss=mse,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    ) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
            plain.step(expected, mse, beside, x, y, schedule.microbatches)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "expected a blank and the stages of device 0"),
        (["0F0,0B0", "1F0"], "device 1: stage 1 has no backward of micro-batch 0"),
        (["0F0,0B0,1F0,1B0", "1F0,1B0"], "stage 1 is on device 0 already"),
    ],
)
def test_what_is_no_whole_schedule_is_refused(given: list[str], told: str) -> None:
    with pytest.raises(FxpipeError, match=told):
        from_csv(given)
