"""Predictions of published runs: those that are committed keep their bounds, and are what the code
predicts."""

from __future__ import annotations

from statistics import mean, median

import pytest

from benchmarks import published
from benchmarks.published_gpt import gpipe, megatron, zero_bubble
from benchmarks.published_images import memory, speed

pytestmark = pytest.mark.models
smoke = pytest.mark.smoke

BOUNDS = {
    "Zero Bubble Table 4, rates": (0.04, 0.10),
    "Zero Bubble Table 4, memory": (0.05, 0.10),
    "Megatron SC'21 Table 1": (0.05, 0.12),
    "GPipe Tables 2 and 3, Transformer-48": (0.06, 0.07),
    "torchgpipe, memory": (0.03, 0.10),
}
"""Table → the most that predictions are off, in the mean and at worst."""

MEDIANS = {
    "torchgpipe, speed of AmoebaNet-D": 0.02,
    "torchgpipe, speed of U-Net": 0.05,
    "torchgpipe, speed of ResNet-101": 0.05,
}
"""Table → the same in the median."""

FOUND = published.results()


def errors(table: str) -> list[float]:
    """Of the rows on which nothing was fitted."""
    return [abs(each.error) for each in FOUND if each.table == table and not each.fitted]


@smoke
def test_every_table_has_a_bound() -> None:
    assert {each.table for each in FOUND} == {*BOUNDS, *MEDIANS}


@smoke
@pytest.mark.parametrize("table", BOUNDS)
def test_predictions_are_within_their_bounds(table: str) -> None:
    most, worst = BOUNDS[table]
    assert mean(errors(table)) <= most
    assert max(errors(table)) <= worst


@smoke
@pytest.mark.parametrize("table", MEDIANS)
def test_predictions_of_torchgpipes_speed_are_near_in_the_median(table: str) -> None:
    assert median(errors(table)) <= MEDIANS[table]


@smoke
def test_at_most_one_row_of_a_table_is_fitted() -> None:
    for table in {each.table for each in FOUND}:
        assert sum(bool(each.fitted) for each in FOUND if each.table == table) <= 1


PREDICTED = {
    "Zero Bubble Table 4, rates": (zero_bubble, "GPT 6.2B 1f1b p=8 m=24"),
    "Megatron SC'21 Table 1": (megatron, "GPT 3.6B"),
    "torchgpipe, speed of U-Net": (speed, "U-Net (5,64) 192x192 gpipe p=1 m=2"),
}
"""Table → what predicts it, and how the run of a row begins that takes little time."""


@smoke
@pytest.mark.parametrize("table", PREDICTED)
def test_what_is_committed_is_what_is_predicted(table: str) -> None:
    predict, run = PREDICTED[table]
    known = [each for each in FOUND if each.table == table]
    efficiency = next(float(each.fitted) for each in known if each.fitted)
    committed = next(each for each in known if each.run.startswith(run))
    (made,) = (made for made in published.tables() if made.name == table)
    rows = [row for row in made.rows if published.run_of(row) == committed.run]
    # the efficiency is written with three digits
    assert predict(rows[0], efficiency) == pytest.approx(committed.predicted, rel=0.005)


@smoke
def test_a_transformer_over_cores_of_a_tpu_is_as_committed() -> None:
    (table,) = (made for made in published.tables() if made.name.startswith("GPipe"))
    committed = [each.predicted for each in FOUND if each.table == table.name]
    assert [gpipe(row, 0.5) for row in table.rows[:1]] == pytest.approx(committed[:1], rel=0.001)


def test_the_memory_of_a_whole_model_is_as_committed() -> None:
    (row,) = (x for x in FOUND if x.table == "torchgpipe, memory" and x.run.startswith("U-Net (6,"))
    assert memory(row.run) == pytest.approx(row.predicted, rel=0.001)
