"""Cases of the benchmarks' models, trained as pipelines and in the plain loop."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

import fxpipe
from benchmarks.models.cases import Case
from fxpipe.ir.recipe import RECIPES
from tests.helpers.profiles import DEEP
from tests.oracles import loop

assert fxpipe.schedules  # importing it has registered the library's schedules
MICROBATCHES = 4
SCHEDULES = [name for name in ("1f1b", "gpipe", "zb-h1") if name in RECIPES]


PLAIN = "GPT-2", "U-Net (2, 4)"
"""One model of others and one of our own."""


class Setting(NamedTuple):
    case: Case
    schedule: str
    stages: int


def settings(cases: Sequence[Case]) -> list[object]:
    """Each case under some schedule and number of stages, in turn; in a deep run under all.
    All but the models of `PLAIN` are marked deep.
    """
    grid = list(itertools.product(SCHEDULES, (2, 3, 4)))
    turns = itertools.cycle(
        zip(itertools.cycle(SCHEDULES), itertools.cycle((4, 2, 3, 3)), strict=False)
    )
    chosen = itertools.product(cases, grid) if DEEP else zip(cases, turns, strict=False)
    return [
        pytest.param(
            Setting(case, *how),
            id=f"{case.name}-{how[0]}-{how[1]}",
            marks=[] if case.name in PLAIN else [pytest.mark.deep],
        )
        for case, how in chosen
    ]


def assert_trained_as_by_the_loop(setting: Setting) -> None:
    """Two steps; the second adds to the gradients of the first, with uneven micro-batches."""
    case, schedule, stages = setting
    torch.manual_seed(0)
    model = case.model()
    alone = copy.deepcopy(model)
    with fxpipe.compile(
        model, ["cpu"] * stages, schedule=schedule, microbatches=MICROBATCHES, loss=case.loss
    ) as pipe:
        for rows in (2 * MICROBATCHES, 2 * MICROBATCHES + 1):
            batch = case.batch(rows)
            loss = pipe.step(*batch.args, target=batch.target, **batch.kwargs)
            expected = loop.train(
                alone,
                MICROBATCHES,
                *batch.args,
                loss=case.loss or (lambda output: output.loss),
                target=batch.target,
                **batch.kwargs,
            )
            assert torch.equal(loss, expected.loss)
        assert pipe.schedule.name == schedule
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    assert any(gradient is not None for gradient in loop.gradients(model).values())
    loop.assert_same(model.state_dict(), alone.state_dict())
