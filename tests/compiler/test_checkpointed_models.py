"""Models that call ``torch.utils.checkpoint``: they train as in the loop, with one warning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fxpipe
from tests.helpers.unasked import told
from tests.oracles import loop


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
        self.how = how
        if how == "asked":
            # as gradient_checkpointing_enable() of transformers and diffusers does
            self.gradient_checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "sequential":
            y: Tensor = checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
            return y
        for block in self.blocks:
            if (self.how == "asked" and torch.is_grad_enabled()) or "reentrant" in self.how:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
            else:
                x = block(x)
        return x


def warnings_of(
    model: nn.Module, caplog: pytest.LogCaptureFixture, sizes: tuple[int, ...] = (4, 6), **more: Any
) -> list[str]:
    """Train on batches of these sizes as the loop does; returns the warnings of checkpoints."""
    alone = copy.deepcopy(model)
    with told(caplog) as messages, fxpipe.compile(model, 2, loss=mse_loss, **more) as pipe:
        for size in sizes:
            x, y = torch.randn(2, size, 4)
            looped = loop.train(alone, 2, x, loss=mse_loss, target=y)
            assert torch.equal(pipe.step(x, target=y), looped.loss)
    loop.assert_same(loop.gradients(model), loop.gradients(alone))
    return [message for message in messages if "checkpoint" in message]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("how", ["reentrant", "nonreentrant", "sequential", "asked"])
def test_a_checkpoint_in_a_model_is_told_once_with_the_option_that_recomputes(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "reentrant":  # in the loop, it would have no gradients without one at its input
        model: nn.Module = nn.Sequential(nn.Linear(4, 4), Checkpointed(how))
    else:
        model = Checkpointed(how)
    (message,) = warnings_of(model, caplog, microbatches=2)
    assert message.startswith(type(model).__name__)
    assert 'recompute="always"' in message


@pytest.mark.parametrize(
    "more",
    [
        {"recompute": "always"},
        {"extensions": [fxpipe.LeafModules("1")]},
        {"schedule": "1f1b", "recompute": {0: "always"}},
    ],
    ids=str,
)
def test_nothing_is_told_where_something_recomputes(
    more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Checkpointed("nonreentrant"), nn.Linear(4, 4))
    assert warnings_of(model, caplog, microbatches=2, **more) == []


def test_nothing_is_told_of_other_models_and_without_gradients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert warnings_of(Checkpointed("no"), caplog, microbatches=2) == []
    model = Checkpointed("asked")
    with (
        told(caplog) as messages,
        fxpipe.compile(model, 2, microbatches=2) as pipe,
        torch.no_grad(),
    ):
        pipe(torch.randn(4, 4))
    assert messages == []
