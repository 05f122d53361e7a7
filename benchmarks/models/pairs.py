"""Modules on several values at once: with them a model such as AmoebaNet-D is a sequence."""

from __future__ import annotations

from torch import Tensor, nn


class Twice(nn.Module):
    """A value as a pair."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class First(nn.Module):
    """The first of several values alone."""

    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        return values[0]


class Cell(nn.Module):
    """A cell between pairs of the last cell's result and that of the one before."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        last, before = pair
        return self.cell(last, before), last
