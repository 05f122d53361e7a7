"""An input of torch.fx's traces may be any object, over ranks, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpipe
from tests.helpers.ranks import DeviceMesh, on_ranks


class Factor:
    """An input whose text names its address."""

    value = 2.0


class Factored(nn.Sequential):
    def forward(self, x: torch.Tensor, factor: Any = None) -> torch.Tensor:
        out: torch.Tensor = super().forward(x * factor.value)  # type: ignore[no-untyped-call]
        return out


def with_object(mesh: DeviceMesh) -> tuple[float, float, str]:
    """A loss where an input is no tensor, what it is in the loop, and the text of that input."""
    torch.manual_seed(0)
    model, x = Factored(nn.Linear(4, 4), nn.Linear(4, 2)), torch.ones(4, 4)
    factor = [Factor() for _ in range(100)][mesh.get_local_rank()]  # of addresses that differ
    options: dict[str, Any] = {"microbatches": 2, "loss": F.mse_loss, "extensions": ["symbolic"]}
    expected = F.mse_loss(model(x, factor), x[:, :2]).item()
    with fxpipe.compile(model, mesh, partition=["1"], **options) as pipe:
        return float(pipe.step(x, factor=factor, target=x[:, :2])), expected, repr(factor)


@pytest.mark.filterwarnings("ignore:Was not able to add assertion")
def test_an_input_is_the_same_on_ranks_wherever_it_is_in_memory() -> None:
    (loss, expected, first), (other, _, second) = on_ranks(2, with_object)
    assert loss == other == pytest.approx(expected)
    assert first != second
