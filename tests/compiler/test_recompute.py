"""Recomputation: the same gradients, masks and statistics, and less that is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from examples.unet import UNet
from fxpipe.ir.recipe import RECIPES, find_recipe
from fxpipe.passes.schedule import add_recompute
from tests.helpers.overlapping import ADAMW, compiled, make
from tests.helpers.profiles import LEVELS, deep
from tests.oracles import loop
from tests.oracles.delayed_loop import DelayedLoop


def unet() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        UNet(channels=1, base=4, depth=LEVELS),
        torch.randn(7, 1, 16, 16),
        torch.randn(7, 1, 16, 16),
    )


@pytest.mark.parametrize(
    ("schedule", "recompute", "kept"),
    [
        *deep(("gpipe", "never", [3, 3]), ("gpipe", "always", [1, 1])),
        ("gpipe", "except_last", [2, 2]),
        *deep(("gpipe", ["always", "never"], [1, 3])),
        ("gpipe", {1: "always"}, [3, 1]),
        *deep(("1f1b", "always", [1, 1])),
        ("zb-h1", "except_last", None),
        ("interleaved-1f1b", "always", None),
    ],
)
def test_what_runs_again_gives_the_same_gradients_and_counts_once(
    schedule: str, recompute: Any, kept: list[int] | None
) -> None:
    model, x, y = unet()
    alone = copy.deepcopy(model)
    expected = loop.train(alone, 3, x, loss=nn.functional.mse_loss, target=y)
    with fxpipe.compile(
        model,
        2,
        schedule=schedule,
        microbatches=3,
        recompute=recompute,
        loss=nn.functional.mse_loss,
    ) as pipe:
        assert torch.equal(pipe.step(x, target=y), expected.loss)
        if kept is not None:
            assert [pipe.kept[stage] for stage in range(2)] == kept
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    loop.assert_same(dict(model.named_buffers()), dict(alone.named_buffers()))


class Counted(nn.Module):
    """What it returns depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), nn.Buffer(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        out: Tensor = (self.linear(x) * self.calls).tanh()
        return out


@pytest.mark.parametrize("schedule", ["gpipe", *deep("1f1b")])
def test_what_runs_again_reads_the_buffers_that_its_forward_read(schedule: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Counted(), Counted()), torch.randn(6, 6)
    alone = copy.deepcopy(model)
    expected = loop.train(alone, 3, x, loss=nn.functional.mse_loss, target=x)
    with fxpipe.compile(
        model,
        2,
        schedule=schedule,
        microbatches=3,
        recompute="always",
        loss=nn.functional.mse_loss,
    ) as pipe:
        assert torch.equal(pipe.step(x, target=x), expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    loop.assert_same(dict(model.named_buffers()), dict(alone.named_buffers()))


def test_a_call_that_is_differentiated_recomputes_too() -> None:
    model, *given = unet()
    x, y = (each.double() for each in given)
    alone = copy.deepcopy(model.double())
    loop.train(alone, 3, x, loss=nn.functional.mse_loss, target=y)
    with fxpipe.compile(model, 2, microbatches=3, recompute="always") as pipe:
        out = pipe(x)
        nn.functional.mse_loss(out, y).backward()
    loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)


def test_recomputation_reads_the_version_that_the_forward_read() -> None:
    model, data = make("mlp", 8, 5)
    expected = DelayedLoop.beside(model, ADAMW, 4)
    with compiled(model, 3, 4, ADAMW, recompute="always") as pipe:
        for x, y in data:
            assert torch.equal(pipe.step(x, target=y), expected.step(x, y))
        pipe.flush()
        assert set(pipe.kept.values()) == {1}
    expected.assert_same(model)


class Told(nn.Module):
    """A module with dropout that is called as it is, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.drop(self.linear(x))
        return out


def test_a_leaf_that_runs_again_draws_the_same_mask() -> None:
    found = []
    for recompute in ("never", "always"):
        torch.manual_seed(0)
        told = Told()
        model = nn.Sequential(nn.Linear(6, 6), told, nn.Linear(6, 2))
        x, y = torch.randn(6, 6), torch.randn(6, 2)
        with fxpipe.compile(
            model,
            2,
            microbatches=2,
            recompute=recompute,
            extensions=[fxpipe.LeafModules(Told)],
            loss=nn.functional.mse_loss,
        ) as pipe:
            pipe.prepare(x, target=y)
            told.calls = 0
            torch.manual_seed(7)
            pipe.step(x, target=y)
        found.append(loop.gradients(model))
        assert told.calls == (2 if recompute == "never" else 4)
    loop.assert_same(found[1], found[0])


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"inference"}))
def test_every_schedule_of_the_library_can_recompute(name: str) -> None:
    for devices, microbatches in ((1, 1), (2, 3), (3, 2)):
        schedule = find_recipe(name)(devices, microbatches)
        again = add_recompute(schedule, ["always"] * schedule.stages)
        assert again.verify() is again
        kinds = [task.kind for row in again.rows for task in row]
        assert kinds.count("R") == microbatches * schedule.stages


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        ("allways", "there is no mode 'allways' of recompute: did you mean 'always'"),
        (True, "there is no mode True of recompute"),
        (["always"], "recompute has 1 modes for 2 stages"),
        ({3: "always"}, "recompute names stage 3; the stages are 0 to 1"),
        ({0: "often"}, "there is no mode 'often'"),
    ],
)
def test_a_wrong_mode_is_refused(recompute: Any, message: str) -> None:
    with pytest.raises(fxpipe.InputError, match=message):
        fxpipe.compile(nn.Sequential(nn.Linear(2, 2)), 2, recompute=recompute)
