"""Stages side by side: simulations in which they run at the same time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe import Schedule, VerificationError
from fxpipe.extensions.simulator.chain import chain_program
from fxpipe.ir.value import HOST
from fxpipe.schedules import one_f_one_b
from fxpipe.schedules.one_f_one_b import seq1f1b
from tests.schedules.test_side_by_side import (
    COSTS,
    TOWERS,
    VOCABULARY,
    Towers,
    edges_of,
    ends_of,
    orders,
    reachable,
    schedules,
)


@given(schedules())
def test_a_task_starts_when_its_device_and_the_stages_that_feed_its_own_are_ready(
    schedule: Schedule,
) -> None:
    try:
        schedule.verify()
    except VerificationError:
        return
    ends = ends_of(orders(schedule, reachable(schedule.stages, edges_of(schedule))))
    assert ends is not None
    chain_program(schedule).verify()
    found = {
        (x.letter, x.microbatch, x.stage): span.end
        for span in schedule.simulate(COSTS).spans
        for x in [cast(Any, span.instruction)]
        if span.instruction.letter in ("F", "B")
    }
    assert found == {(t.kind, t.microbatch, t.stage): end for t, end in ends.items()}


@pytest.mark.smoke
def test_two_shards_of_a_vocabulary_run_at_the_same_time() -> None:
    schedule = Schedule.parse(VOCABULARY).verify()
    assert str(schedule) == VOCABULARY
    assert "\n".join(
        line.rstrip() for line in str(schedule.grid(costs=COSTS)).splitlines()[1:]
    ) == (
        "0: F0@0 F1@0 F0@2 .    F1@2 B0@2----- .    .    B0@0----- B1@2----- .    .    B1@0-----\n"
        "1: .    F0@1 F0@3 F1@1 F1@3 B0@3----- B0@1----- B1@3----- .    .    B1@1----- .    ."
    )
    assert schedule.simulate(COSTS).makespan == 17
    assert replace(schedule, edges=None).verify().simulate(COSTS).makespan == 21


def test_slices_begin_and_end_in_the_stages_that_none_feeds_and_that_feed_none() -> None:
    schedule = replace(seq1f1b(2)(3, 2), edges=((0, 2), (1, 2)))
    program = chain_program(schedule).verify()
    assert [str(edge) for edge in program.edges if edge.source == HOST] == [
        "in x host->0",
        "in x host->1",
        "in x host->3",
        "in x host->4",
    ]
    assert schedule.simulate().makespan < seq1f1b(2)(3, 2).simulate().makespan


@pytest.mark.smoke
@pytest.mark.models
def test_two_towers_overlap_in_predictions() -> None:
    torch.manual_seed(0)
    x, words, y = torch.randn(8, 3, 3, 3), torch.randint(11, (8, 5)), torch.randn(8, 4)
    with fxpipe.compile(
        Towers(),
        ["cpu"] * 4,
        schedule="1f1b",
        microbatches=4,
        partition=["image.3", "text", "head"],
        loss=mse_loss,
    ) as pipe:
        pipe.step(x, words, target=y)
        # drawn by hand: the text encoder's first forward is with that of the image encoder, and the
        # head, from 2 to 14 without a pause, is followed by two backwards of the image encoder
        expected = """
           0     2     4     6     8     10    12    14    16
        0: F0 F1 F2 F3 .  .  .  B0--- .  B1--- .  B2--- .  B3---
        1: .  F0 F1 F2 .  B0--- F3 B1--- .  B2--- .  B3--- .  .
        2: F0 F1 .  .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
        3: .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .
        """
        lines = [line.strip() for line in expected.strip().splitlines()]
        grid = str(pipe.schedule.grid(costs=COSTS))
        assert [line.strip() for line in grid.splitlines()] == lines
        assert pipe.simulate(COSTS).makespan == pipe.schedule.simulate(COSTS).makespan == 18
    assert one_f_one_b(4, 4).simulate(COSTS).makespan == 21
    assert pipe.schedule.edges == TOWERS
