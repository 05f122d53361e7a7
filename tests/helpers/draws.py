"""Models that draw random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.helpers.fronted import front_end, run_graph


class Draws(nn.Module):
    """Any function of the input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def drawn(function: Callable[[Tensor], Any], x: Tensor, seed: int = 0) -> Any:
    """What a function makes of a tensor, as the front end compiles it, with a seed."""
    model = Draws(function)
    return run_graph(model, front_end(model, x), x, seed=seed)[0]
