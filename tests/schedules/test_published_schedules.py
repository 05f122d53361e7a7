"""Schedules of papers, written with the language: they keep what the papers say, and train as the
loop does."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from examples.published_schedules import bpipe, helixpipe, mepipe, slimpipe, sppo
from fxpipe import Recipe, Schedule
from fxpipe.schedules import one_f_one_b
from fxpipe.schedules.one_f_one_b import seq1f1b
from tests.helpers.profiles import deep
from tests.oracles import loop

RECIPES = [
    slimpipe(4),
    slimpipe(4, 2),
    mepipe(4, 3),
    sppo(4),
    helixpipe(2),
    helixpipe(4),
    bpipe,
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_published_schedule_is_valid_and_is_read_back(recipe: Recipe) -> None:
    for devices, microbatches in (1, 1), (2, 3), (4, 4), (4, 9):
        schedule = recipe(devices, microbatches).verify()
        assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_slimpipe_keeps_a_micro_batch_and_two_slices_for_each_device_behind(n: int) -> None:
    for p in 2, 4:
        schedule = slimpipe(n)(p, 4)
        assert schedule.kept().devices == tuple(min(4 * n, n + 2 * (p - 1 - d)) for d in range(p))


@pytest.mark.parametrize("later", [0, 3])
def test_mepipe_puts_off_so_many_weight_gradients(later: int) -> None:
    for p, m in (2, 3), (4, 3), (4, 8):
        schedule = mepipe(4, later)(p, m)
        deferred = schedule.kept().deferred
        assert max(sum(deferred[d::p]) for d in range(p)) >= later + 1
        for row in schedule.rows:
            waiting = 0
            for task in row:
                waiting += (task.kind == "I") - (task.kind == "W")
                assert waiting <= later + 1


def test_sppo_offloads_slices_of_the_first_half_alone() -> None:
    schedule = sppo(4)(2, 2)
    stored = {stage for stage, _ in schedule.indices_of("O")}
    assert stored == {0, 1, 2, 3}  # two stages of the model, in slices 0 and 1 of 4


@pytest.mark.parametrize(("layers", "p", "m"), [(2, 2, 4), (4, 4, 4), (4, 2, 3)])
def test_helixpipe_runs_the_attention_of_each_micro_batch_on_a_device_of_its_own(
    layers: int, p: int, m: int
) -> None:
    schedule = helixpipe(layers)(p, m)
    for stage in range(3 * layers):
        homes = [schedule.device_of(stage, i) for i in range(m)]
        layer = stage // 3 * p // layers
        assert homes == [i % p if stage % 3 == 1 else layer for i in range(m)]


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
def test_bpipe_keeps_at_most_half_as_many_as_there_are_devices_and_one_more(p: int) -> None:
    for row, plain in zip(bpipe(p, 2 * p).rows, one_f_one_b(p, 2 * p).rows, strict=True):
        here = most = 0
        for task in row:
            assert here <= p // 2 + 1 or task.kind != "F"
            here += {"F": 1, "P": 1, "B": -1, "O": -1}.get(task.kind, 0)
            most = max(most, here)
        assert most <= p // 2 + 2  # while one more is being stored or fetched
        assert [task for task in row if task.kind not in "OP"] == [*plain]


class Attention(nn.Module):
    """Causal attention with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, -1)).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.out(read[:, 0])
        return out


def stepped(
    model: nn.Module, recipe: Recipe, x: Tensor, y: Tensor, p: int, m: int
) -> dict[str, Tensor | None]:
    """The gradients of a step."""
    model = copy.deepcopy(model)
    options: dict[str, Any] = {"extensions": [fxpipe.Slices(dim=1)]} if recipe.slices > 1 else {}
    with fxpipe.compile(
        model, ["cpu"] * p, schedule=recipe, microbatches=m, loss=F.mse_loss, **options
    ) as pipe:
        pipe.step(x, target=y)
    return loop.gradients(model)


def attending() -> tuple[nn.Module, Tensor, Tensor]:
    """A model, sequences and targets."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(8) for _ in range(4))).double()
    x, y = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    return model, x, y


@cache
def by_seq1f1b(slices: int) -> dict[str, Tensor | None]:
    """The gradients of a step of ``attending``."""
    model, x, y = attending()
    return stepped(model, seq1f1b(slices), x, y, 2, 2)


@pytest.mark.models
@pytest.mark.parametrize(
    "recipe",
    [slimpipe(2), slimpipe(2, 2), mepipe(2, 1), sppo(2), *deep(slimpipe(4), mepipe(4, 3), sppo(4))],
    ids=lambda recipe: recipe.name,
)
def test_published_schedules_of_slices_train_as_the_loop(recipe: Recipe) -> None:
    model, x, y = attending()
    found = stepped(model, recipe, x, y, 2, 2)
    loop.train(model, 2, x, loss=F.mse_loss, target=y)
    loop.assert_same(found, loop.gradients(model), 1e-14)
    loop.assert_same(found, by_seq1f1b(recipe.slices))


@pytest.mark.models
@pytest.mark.parametrize(("recipe", "p", "m"), [(helixpipe(2), 2, 4), (bpipe, 4, 8)])
def test_published_schedules_of_whole_sequences_train_as_the_loop(
    recipe: Recipe, p: int, m: int
) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(*layers).double()
    x, y = torch.randn(2, 16, 8, dtype=torch.float64)
    found = stepped(model, recipe, x, y, p, m)
    loop.train(model, m, x, loss=F.mse_loss, target=y)
    # HelixPipe's copies of attention sum in parts
    loop.assert_same(found, loop.gradients(model), 1e-14 if recipe is not bpipe else 0.0)
