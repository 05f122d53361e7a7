"""AmoebaNet-D (L, D): Real et al., arXiv 1802.01548, as GPipe's paper scales it, arXiv 1811.06965.

L is the number of normal cells, D the number of filters. Each cell reads the results of the two
cells before it. What a normal cell returns is that of the authors' own program, with which the
parameters are as many as GPipe's paper says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

Operation = Callable[[int, int], nn.Module]
"""Channels, stride → module."""


class Convolutions(nn.Sequential):
    """ReLU, convolution and batch norm, for each kernel in turn.

    Args:
        widths: channels before, between and after the convolutions.
        kernels: the height and width of each.
        stride: of the whole.
    """

    def __init__(
        self, widths: Sequence[int], kernels: Sequence[tuple[int, int]], stride: int = 1
    ) -> None:
        layers: list[nn.Module] = []
        largest = max(kernels)
        for (before, after), kernel in zip(pairwise(widths), kernels, strict=True):
            height, width = kernel
            # a long kernel takes the stride along its own side, of others the largest takes it
            if height != width:
                strides = (stride, 1) if height > width else (1, stride)
            else:
                strides = (stride, stride) if kernel == largest else (1, 1)
            padding = (height // 2, width // 2)
            layers += [
                nn.ReLU(),
                nn.Conv2d(before, after, kernel, strides, padding, bias=False),
                nn.BatchNorm2d(after),
            ]
        super().__init__(*layers)


class FactorizedReduce(nn.Module):
    """Halves the image by two 1×1 convolutions, one a pixel off the other."""

    def __init__(self, channels: int, features: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels, features // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels, features // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(features)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        shifted = nn.functional.pad(x, (-1, 1, -1, 1))
        y: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return y


def none(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorizedReduce(channels, channels)


def average(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def maximum(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def maximum_of_four(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def one(channels: int, stride: int) -> nn.Module:
    return Convolutions([channels] * 2, [(1, 1)], stride)


def three(channels: int, stride: int) -> nn.Module:
    quarter = channels // 4
    kernels = [(1, 1), (3, 3), (1, 1)]
    return Convolutions([channels, quarter, quarter, channels], kernels, stride)


def seven(channels: int, stride: int) -> nn.Module:
    quarter = channels // 4
    kernels = [(1, 1), (1, 7), (7, 1), (1, 1)]
    return Convolutions([channels, quarter, quarter, quarter, channels], kernels, stride)


@dataclass(frozen=True)
class Genotype:
    """What a cell computes. States 0 and 1 are the two cells before; each pair makes one more.

    Attributes:
        pairs: two states, each with what is done to it; the results are added.
        returned: the states that the cell returns, side by side.
    """

    pairs: tuple[tuple[tuple[int, Operation], tuple[int, Operation]], ...]
    returned: tuple[int, ...]


NORMAL = Genotype(
    (
        ((1, one), (1, maximum)),
        ((1, none), (0, seven)),
        ((0, one), (0, seven)),
        ((2, maximum), (2, none)),
        ((1, average), (5, one)),
    ),
    (0, 3, 4, 6),
)
REDUCTION = Genotype(
    (
        ((0, maximum_of_four), (0, maximum)),
        ((2, none), (1, three)),
        ((2, seven), (2, maximum)),
        ((3, none), (1, maximum_of_four)),
        ((2, average), (3, one)),
    ),
    (4, 5, 6),
)


class Cell(nn.Module):
    """One cell; a reduction halves the image.

    Args:
        genotype: what it computes.
        before: channels of the cell two before.
        last: channels of the cell before.
        channels: of each state.
        halved: whether the cell before is half the size of the one before it.
    """

    def __init__(
        self, genotype: Genotype, before: int, last: int, channels: int, halved: bool
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.first = Convolutions([last, channels], [(1, 1)])
        self.second: nn.Module = nn.Identity()
        if halved:
            self.second = FactorizedReduce(before, channels)
        elif before != channels:
            self.second = Convolutions([before, channels], [(1, 1)])
        self.operations = nn.ModuleList(
            operation(channels, 2 if genotype is REDUCTION and state < 2 else 1)
            for pair in genotype.pairs
            for state, operation in pair
        )

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        states = [self.first(last), self.second(before)]
        operations = iter(self.operations)
        for (left, _), (right, _) in self.genotype.pairs:
            states.append(next(operations)(states[left]) + next(operations)(states[right]))
        return torch.cat([states[index] for index in self.genotype.returned], dim=1)


class AmoebaNetD(nn.Module):
    """A classifier of images; their sides must be multiples of 32.

    Args:
        cells: L, a multiple of 3: a third of them before, between and behind two reductions.
        filters: D, a multiple of 16.
        classes: how many.
    """

    def __init__(self, cells: int, filters: int, classes: int = 1000) -> None:
        super().__init__()
        channels = filters // 4
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels)
        )
        normal = [NORMAL] * (cells // 3)
        order = [REDUCTION, REDUCTION, *normal, REDUCTION, *normal, REDUCTION, *normal]
        before = last = channels
        halved = False
        self.cells = nn.ModuleList()
        for genotype in order:
            channels *= 2 if genotype is REDUCTION else 1
            self.cells.append(Cell(genotype, before, last, channels, halved))
            before, last = last, channels * len(genotype.returned)
            halved = genotype is REDUCTION
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes))

    def forward(self, image: Tensor) -> Tensor:
        before = last = self.stem(image)
        for cell in self.cells:
            before, last = last, cell(last, before)
        y: Tensor = self.head(last)
        return y
