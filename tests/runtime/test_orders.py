"""Backwards and weight gradients in any order: the sums are those of a loop in the same order."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe import Schedule
from tests.oracles import loop

MICROBATCHES = 4


def schedule_of(orders: Sequence[Sequence[int]], halves: bool) -> Schedule:
    """All forwards, then the gradients: stage → the order in which it adds them."""
    forwards = " ".join(f"F{i}" for i in range(MICROBATCHES))
    inputs = " ".join(f"I{i}" for i in orders[-1])  # in the order of the last stage
    lines = [
        f"schedule mine stages={len(orders)} microbatches={MICROBATCHES} delay=0",
        f"place {' | '.join(map(str, range(len(orders))))}",
    ]
    for stage, order in enumerate(orders):
        sums = " ".join(f"W{i}" if halves else f"B{i}" for i in order)
        lines.append(f"{stage}: {forwards} {f'{inputs} {sums}' if halves else sums} U")
    return Schedule.parse("\n".join(lines)).verify()


def steps(
    schedule: Schedule, orders: Sequence[Sequence[int]], order: Sequence[int], **options: Any
) -> None:
    """Two steps of stages that add in one order, beside a loop in that order."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh()) for _ in orders)
    model = nn.Sequential(*blocks)
    alone = copy.deepcopy(model)
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    x, y = torch.randn(2, 4 * MICROBATCHES, 5).unbind()
    with fxpipe.compile(
        model,
        schedule.devices,
        schedule=schedule,
        loss=mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        partition=[str(stage) for stage in range(1, len(orders))],
        **options,
    ) as pipe:
        for _ in range(2):
            sgd.zero_grad()
            pipe.step(x, target=y)
            loop.train(alone, MICROBATCHES, x, loss=mse_loss, target=y, order=order)
            if "clip_norm" in options:
                nn.utils.clip_grad_norm_(alone.parameters(), options["clip_norm"])
            sgd.step()
        bound = 1e-6 if "clip_norm" in options else 0.0  # norms of stages are added otherwise
        loop.assert_same(pipe.state_dict(), alone.state_dict(), bound)


@given(st.permutations(range(MICROBATCHES)), st.booleans())
def test_gradients_in_any_order_are_those_of_a_loop_in_that_order(
    order: Sequence[int], halves: bool
) -> None:
    orders = [order] * 2
    steps(schedule_of(orders, halves), orders, order)


def test_gradients_are_clipped_after_the_last_of_any_order() -> None:
    order = [2, 3, 1, 0]
    steps(schedule_of([order] * 2, False), [order] * 2, order, clip_norm=0.1)


def test_stages_may_add_weight_gradients_in_orders_of_their_own() -> None:
    orders = [3, 0, 2, 1], [1, 2, 3, 0]
    schedule = schedule_of(orders, halves=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    x, y = torch.randn(2, 4 * MICROBATCHES, 5).unbind()
    alone = [copy.deepcopy(model) for _ in orders]
    with fxpipe.compile(model, 2, schedule=schedule, loss=mse_loss, partition=["1"]) as pipe:
        pipe.step(x, target=y)
    for one, order in zip(alone, orders, strict=True):
        loop.train(one, MICROBATCHES, x, loss=mse_loss, target=y, order=order)
    for stage, one in enumerate(alone):  # the other stage's gradients are in another order
        found, expected = (each.get_submodule(str(stage)) for each in (model, one))
        loop.assert_same(loop.gradients(found), loop.gradients(expected))
