"""A model around the module that a test is about."""

from __future__ import annotations

from torch import Tensor, nn


class Around(nn.Module):
    """Layers around another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.inner(self.first(x)))
        return y
