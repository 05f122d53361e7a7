"""Training with split backwards, under every synchronous schedule: equal to the plain loop."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from examples.unet import UNet
from fxpipe.ir.recipe import RECIPES, Recipe, one_each, vee
from fxpipe.ir.task import B, F, I, Task, U, W
from tests.helpers.profiles import DEEP, some
from tests.oracles import loop
from tests.oracles.copied_loop import CopiedLoop

LIBRARY = sorted(
    name
    for name, recipe in RECIPES.items()
    if recipe.__class__ is Recipe and name != "inference" and not recipe(2, 2).depth
)


class Block(nn.Module):
    """A transformer block that attends to what came before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.project(self.before(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        narrow: Tensor = self.narrow(nn.functional.gelu(self.wide(self.between(x))))
        return x + narrow


class Transformer(nn.Module):
    """Characters in, scores out; the embedding is the head as well."""

    def __init__(self, symbols: int = 11, width: int = 8, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.blocks(self.embed(x)))
        return hidden @ self.embed.weight.T


def scores(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def unet() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = UNet(channels=1, base=2, depth=2)
    return model, torch.randn(9, 1, 8, 8), torch.randn(9, 1, 8, 8)


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Transformer(), torch.randint(11, (8, 5)), torch.randint(11, (8, 5))


Make = Callable[[], tuple[nn.Module, Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]
CASES: dict[str, tuple[Make, Loss]] = {
    "unet": (unet, nn.functional.mse_loss),
    "transformer": (transformer, scores),
}
CUTS = {
    "unet": {
        2: ["bottom"],
        3: ["downs.1", "widens.1"],
        4: ["downs.1", "bottom", "widens.1"],
        8: ["downs.0.3", "downs.1", "downs.1.3", "bottom", "widens.0", "widens.1", "ups.1.3"],
    },
    "transformer": {
        2: ["blocks.2"],
        3: ["blocks.1", "blocks.3"],
        4: ["blocks.1", "blocks.2", "blocks.3"],
        8: [f"blocks.{i}{part}" for i in range(4) for part in ("", ".between")][:7],
    },
}
"""Case → stages → where they begin; nothing has to be measured for that."""


def assert_equals_the_loop(case: str, recipe: Recipe, devices: int, microbatches: int) -> None:
    """Gradients, loss and buffers of one step; parameters after two more with an optimizer."""
    make, loss = CASES[case]
    model, x, y = make()
    alone = copy.deepcopy(model)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    ways = CopiedLoop(alone, theirs, loss, microbatches, lambda name, i: i % 2)
    copied = bool(recipe.copies(devices))
    with fxpipe.compile(
        model,
        devices,
        schedule=recipe,
        microbatches=microbatches,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        partition=CUTS[case][recipe.stages(devices)],
        extensions=["deferred_batchnorm"] if copied else [],
    ) as pipe:
        for _ in range(2):
            made = pipe.step(x, target=y)
            theirs.zero_grad()
            if copied:  # the sums of both pipelines are added
                expected = ways.backward(x, y)
            else:
                expected = loop.train(alone, microbatches, x, loss=loss, target=y).loss
            assert torch.equal(made, expected)
            theirs.step()
    if copied:  # the statistics of BatchNorms are those of the whole batch
        loop.assert_same(dict(model.named_parameters()), dict(alone.named_parameters()))
        return
    loop.assert_same(model.state_dict(), alone.state_dict())


EACH = [("1f1b", "unet"), ("zb-h1", "transformer"), ("chimera", "unet")]
if DEEP:
    EACH = [*itertools.product(LIBRARY, CASES)]


@pytest.mark.parametrize(("name", "case"), EACH)
def test_every_synchronous_schedule_of_the_library_trains_as_the_loop(name: str, case: str) -> None:
    assert_equals_the_loop(case, RECIPES[name], 2, 4)


def halves_last(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """Fill, drain the input gradients, and only then take all weight gradients."""
    for stage in stages:
        for i in range(microbatches):
            yield F(i, stage)
    for stage in reversed(stages):
        for i in range(microbatches):
            yield I(i, stage)
    for stage in stages:
        for i in range(microbatches):
            yield W(i, stage)
        yield U(stage)


def mixed(
    device: int, devices: int, microbatches: int, *, stages: tuple[int, ...]
) -> Iterator[Task]:
    """Fill and drain, every second backward in halves."""
    for stage in stages:
        for i in range(microbatches):
            yield F(i, stage)
    for stage in reversed(stages):
        for i in range(microbatches):
            if (i + stage) % 2:
                yield I(i, stage)
                yield W(i, stage)
            else:
                yield B(i, stage)
    for stage in stages:
        yield U(stage)


@pytest.mark.parametrize("case", some(CASES))
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("halves last", halves_last),
        Recipe("halves last", halves_last, placement=vee),
        Recipe("mixed", mixed, placement=vee),
    ],
    ids=["halves", "halves-vee", "mixed-vee"],
)
def test_halves_may_wait_and_mix_with_whole_backwards(recipe: Recipe, case: str) -> None:
    devices = 3 if recipe.placement is one_each else 2
    assert_equals_the_loop(case, recipe, devices, 3)
