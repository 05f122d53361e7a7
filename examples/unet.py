"""A U-Net in the style of Ronneberger et al., arXiv 1505.04597, with padding and BatchNorm."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Sequential):
    """Two 3×3 convolutions with padding, each with BatchNorm and ReLU."""

    def __init__(self, channels: int, features: int) -> None:
        super().__init__(
            nn.Conv2d(channels, features, 3, padding=1, bias=False),
            nn.BatchNorm2d(features),
            nn.ReLU(inplace=True),
            nn.Conv2d(features, features, 3, padding=1, bias=False),
            nn.BatchNorm2d(features),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Maps an image to one of the same size, whose sides must be multiples of 2 ** depth.

    Every level on the way down passes its features across to the same level on the way up::

        down 0 ───────────────────────> up 0 → head
          down 1 ───────────────> up 1
            down 2 ───────> up 2
                  bottom

    Args:
        channels: channels of the image.
        base: features of the first level; each further level has twice as many.
        depth: how often the image is halved.
    """

    def __init__(self, channels: int = 3, base: int = 16, depth: int = 4) -> None:
        super().__init__()
        features = [base << level for level in range(depth + 1)]
        self.downs = nn.ModuleList(
            Block(before, after) for before, after in pairwise([channels, *features[:-1]])
        )
        self.bottom = Block(features[-2], features[-1])
        self.widens = nn.ModuleList(
            nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in reversed(features[:-1])
        )
        self.ups = nn.ModuleList(Block(2 * width, width) for width in reversed(features[:-1]))
        self.head = nn.Conv2d(base, channels, 1)

    def forward(self, image: Tensor) -> Tensor:
        across: list[Tensor] = []
        x = image
        for down in self.downs:
            x = down(x)
            across.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for widen, up in zip(self.widens, self.ups, strict=True):
            x = up(torch.cat([across.pop(), widen(x)], dim=1))
        y: Tensor = self.head(x)
        return y
