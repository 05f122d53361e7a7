"""A pipeline equals a plain loop over the micro-batches on one device, bit for bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import Optimizer

import fxpipe
from examples.unet import UNet
from tests.helpers.profiles import DEEP
from tests.oracles import loop

CUTS = {1: [], 2: ["bottom"], 3: ["downs.1", "widens.1"], 4: ["downs.1", "bottom", "widens.1"]}
"""Stages → where they begin; with three or more, the levels' skips pass over stages."""


class Setting(NamedTuple):
    stages: int
    microbatches: int
    schedule: str
    dtype: torch.dtype


COVERING = [
    Setting(1, 1, "gpipe", torch.float64),
    Setting(1, 3, "1f1b", torch.float32),
    Setting(2, 2, "1f1b", torch.float64),
    Setting(2, 8, "gpipe", torch.float32),
    Setting(3, 1, "1f1b", torch.float32),
    Setting(3, 3, "gpipe", torch.float64),
    Setting(4, 2, "gpipe", torch.float32),
    Setting(4, 8, "1f1b", torch.float64),
]
"""Every value of each field, and every p with both schedules and both types."""

GRID = [
    Setting(*values)
    for values in itertools.product(
        CUTS, (1, 2, 3, 8), ("gpipe", "1f1b"), (torch.float32, torch.float64)
    )
]


def _name(setting: Setting) -> str:
    return f"p{setting.stages}-m{setting.microbatches}-{setting.schedule}-{setting.dtype}"


def images(batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 2, 16, 16, dtype=dtype), torch.randn(batch, 2, 16, 16, dtype=dtype)


def two_unets(dtype: torch.dtype) -> tuple[UNet, UNet]:
    torch.manual_seed(0)
    model = UNet(channels=2, base=2, depth=2).to(dtype)
    return model, copy.deepcopy(model)


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=1e-3)


@pytest.mark.parametrize("setting", GRID if DEEP else COVERING[1::2], ids=_name)
def test_a_unets_losses_gradients_and_statistics_equal_the_loops(setting: Setting) -> None:
    stages, m, schedule, dtype = setting
    model, alone = two_unets(dtype)
    with fxpipe.compile(
        model,
        ["cpu"] * stages,
        schedule=schedule,
        microbatches=m,
        loss=mse_loss,
        partition=CUTS[stages],
    ) as pipe:
        for batch in (2 * m, 2 * m + 1, 3 * m - 1):  # m divides the first alone, if m > 1
            x, y = images(batch, dtype)
            loop.clear(model, alone)
            loss = pipe.step(x, target=y)
            expected = loop.train(alone, m, x, loss=mse_loss, target=y)
            assert torch.equal(loss, expected.loss)
            loop.assert_same(loop.gradients(model), loop.gradients(alone))
            loop.assert_same(model.state_dict(), alone.state_dict())
        assert pipe.schedule.name == schedule
        skips = [edge for edge in pipe.plan.edges if edge.kind == "skip"]
        assert bool(skips) == (stages > 2)


@pytest.mark.parametrize("setting", GRID if DEEP else COVERING[3::4], ids=_name)
@pytest.mark.parametrize("optimizer", [adam, momentum] if DEEP else [adam])
def test_ten_optimizer_steps_end_at_the_weights_of_the_loop(
    setting: Setting, optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
) -> None:
    stages, m, schedule, dtype = setting
    model, alone = two_unets(dtype)
    there = optimizer(alone.parameters())
    with fxpipe.compile(
        model,
        ["cpu"] * stages,
        schedule=schedule,
        microbatches=m,
        loss=mse_loss,
        optimizer=optimizer,
    ) as pipe:
        for step in range(10):
            x, y = images(2 * m + step % 2, dtype)
            loss = pipe.step(x, target=y)
            there.zero_grad()
            expected = loop.train(alone, m, x, loss=mse_loss, target=y)
            there.step()
            assert torch.equal(loss, expected.loss), f"step {step}"
        loop.assert_same(model.state_dict(), alone.state_dict())


class Language(nn.Module):
    """A transformer whose embedding is also its last layer's weight: shared by first and last."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x)
        return scores.flatten(0, 1)


def token_loss(scores: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(scores, tokens.flatten())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"] if DEEP else ["1f1b"])
def test_a_transformer_with_a_tied_embedding_equals_the_loop(schedule: str) -> None:
    torch.manual_seed(1)
    model = Language()
    alone = copy.deepcopy(model)
    with fxpipe.compile(
        model,
        ["cpu"] * 3,
        schedule=schedule,
        microbatches=3,
        loss=token_loss,
        partition=["layers.1", "layers.2"],
    ) as pipe:
        for batch in (6, 7) if DEEP else (6,):
            tokens = torch.randint(11, (batch, 5))
            targets = torch.randint(11, (batch, 5))
            loop.clear(model, alone)
            loss = pipe.step(tokens, target=targets)
            expected = loop.train(alone, 3, tokens, loss=token_loss, target=targets)
            assert torch.equal(loss, expected.loss)
            loop.assert_same(loop.gradients(model), loop.gradients(alone))
        assert [edge.target for edge in pipe.plan.edges if edge.kind == "skip"] == [2]  # the weight


@pytest.mark.parametrize("cut", ["1", "2", "3", "4"])
def test_a_cut_anywhere_in_a_chain_equals_the_loop(cut: str) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    alone = copy.deepcopy(model)
    x, y = torch.randn(5, 4), torch.randn(5, 3)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=2, loss=mse_loss, partition=[cut]) as pipe:
        loss = pipe.step(x, target=y)
    assert torch.equal(loss, loop.train(alone, 2, x, loss=mse_loss, target=y).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


def test_several_devices_equal_the_loop_with_the_threads_that_one_of_them_has() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 4))
    alone = copy.deepcopy(model)
    x, y = torch.randn(256, 64), torch.randn(256, 4)
    torch.set_num_threads(4)
    with fxpipe.compile(model, ["cpu"] * 3, microbatches=2, loss=mse_loss) as pipe:
        loss = pipe.step(x, target=y)
    torch.set_num_threads(1)  # 4 // 3
    expected = loop.train(alone, 2, x, loss=mse_loss, target=y)
    assert torch.equal(loss, expected.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
