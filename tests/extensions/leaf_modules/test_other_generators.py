"""Submodules that draw from Python's random and numpy.random: leaves whose draws have seeds."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.extensions.leaf_modules.draws import seeded
from tests.helpers.around import Around
from tests.helpers.speech import MODELS, ctc, sounds, speech
from tests.oracles import loop


class Augments(nn.Module):
    """Masks, drops and shifts by draws of all three kinds, a hundred of them one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        chances = [random.gauss(0, 1) + numpy.random.normal() for _ in range(100)]
        if random.random() < 0.3:
            return x
        mask = torch.from_numpy(numpy.random.rand(*x.shape) < 0.3)
        y: Tensor = F.dropout(self.layer(x).masked_fill(mask, 0.0), 0.3)
        return y + sum(chances)


def net() -> nn.Sequential:
    parts = [part for _ in range(3) for part in (nn.Linear(4, 4), Augments(), nn.Tanh())]
    return nn.Sequential(*parts, nn.Linear(4, 4))


def all_states() -> str:
    return repr((random.getstate(), numpy.random.get_state()))


@contextmanager
def threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("stages", "options"),
    [
        (1, {}),
        (2, {"schedule": "gpipe"}),
        (2, {"schedule": "gpipe", "recompute": "always"}),
        (3, {"schedule": "1f1b"}),
        (3, {"schedule": "1f1b", "recompute": "except_last"}),
        (3, {"extensions": [fxpipe.LeafModules(Augments)]}),
    ],
)
def test_draws_are_those_of_the_microbatch_and_the_leaf(stages: int, options: Any) -> None:
    torch.manual_seed(0)
    model = net()
    alone = copy.deepcopy(model)
    leaves = [module for module in alone if isinstance(module, Augments)]
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    before = all_states()
    with (
        threads_take_turns_often(),
        fxpipe.compile(
            model,
            stages * ["cpu"],
            microbatches=4,
            loss=F.mse_loss,
            partition=["3", "6"][: stages - 1],
            **options,
        ) as pipe,
    ):
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            losses.append(pipe.step(x, target=y))
            assert all_states() == before
    for step, made in enumerate(losses):
        with seeded(leaves, step, 4):
            assert torch.equal(made, loop.train(alone, 4, x, loss=F.mse_loss, target=y).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("base", MODELS)
def test_models_of_speech_train_with_masks_drawn_by_numpy(base: str, recompute: Any) -> None:
    torch.manual_seed(0)
    model = speech(
        base,
        apply_spec_augment=True,
        mask_time_prob=0.3,
        mask_time_length=4,
        mask_feature_prob=0.2,
        mask_feature_length=2,
        layerdrop=0.3,
    )
    alone = copy.deepcopy(model)
    x, labels = sounds()
    before = all_states()
    with fxpipe.compile(
        model, 2 * ["cpu"], microbatches=2, partition=["lm_head"], loss=ctc, recompute=recompute
    ) as pipe:
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            losses.append(pipe.step(x, target=labels))
    assert all_states() == before
    for step, made in enumerate(losses):
        with seeded([alone.get_submodule(base)], step, 2):
            assert torch.equal(made, loop.train(alone, 2, x, loss=ctc, target=labels).loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))


class Rolls(nn.Module):
    """Draws by Python's own methods, in its own line or in that of a function."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.uniform(0.5, 1.5)  # here


def test_a_warning_names_the_users_line_and_the_leaf(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, 4)
    with fxpipe.compile(
        Around(nn.Sequential(nn.Tanh(), Rolls())), 2, microbatches=2, loss=F.mse_loss
    ) as pipe:
        pipe.step(x, target=x)
    (message,) = [r.getMessage() for r in caplog.records if r.name == "fxpipe"]
    assert "# here (the trace would not be deterministic: it draws from Python's random)" in message
    assert "fxpipe.LeafModules('inner.1')" in message


def test_a_loss_that_is_called_as_it_is_may_draw() -> None:
    def loss(made: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(made, target) * numpy.random.rand()

    found = []
    for stages in (1, 2):
        torch.manual_seed(0)
        model, x = net(), torch.randn(8, 4)
        with fxpipe.compile(model, stages, microbatches=2, loss=loss) as pipe:
            torch.manual_seed(1)
            found.append(pipe.step(x, target=x))
    assert torch.equal(*found)
