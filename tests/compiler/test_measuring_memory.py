"""What is held while the stages of a model are measured, on CPU devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxpipe
from fxpipe.compiler.placement import Placement
from fxpipe.passes.partition.measure import OPERANDS
from tests.helpers.held import Held

ROWS = 64

WIDTHS = range(200, 232, 2)


@torch.library.custom_op("fxpipe_tests::large", mutates_args=())
def large(x: Tensor) -> Tensor:
    """The same numbers; refuses those that are all small."""
    if x.abs().max() < 0.5:
        raise ValueError("all numbers are small")
    return x.clone()


large.register_fake(torch.empty_like)
large.register_autograd(lambda context, gradient: gradient)


class Chain(nn.Module):
    """Layers of different widths; ``refuses`` what shared memory holds."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = zip(WIDTHS, [*WIDTHS[1:], WIDTHS[0]], strict=True)
        self.layers = nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairs))
        self.refuses = refuses

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.refuses:
            x = large(x + 1)
        return x


def most_held(*, refuses: bool) -> int:
    held = Held()
    timed = Placement._timed

    def watched(self: Placement, facts: Mapping[str, Any]) -> Any:
        with held:
            return timed(self, facts)

    x = torch.randn(2 * ROWS, WIDTHS[0])
    with (
        patch.object(Placement, "_timed", watched),
        fxpipe.compile(Chain(refuses), ["cpu"] * 2, microbatches=2, loss=mse_loss) as pipe,
    ):
        pipe.step(x, target=x)
    return held.most


def test_measuring_keeps_no_activations() -> None:
    """Operands share memories of the size of the largest value; the others are of one operation."""
    largest = 4 * WIDTHS[-1] ** 2
    assert most_held(refuses=False) < (OPERANDS + 3) * largest


@pytest.mark.filterwarnings("ignore")
def test_operations_that_refuse_stand_ins_are_measured_with_values() -> None:
    activations = sum(2 * 4 * ROWS * width for width in WIDTHS)  # of the layers, and of tanh
    assert most_held(refuses=True) > activations
