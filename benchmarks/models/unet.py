"""U-Net (B, C), as torchgpipe's paper scales it: Kim et al., arXiv 2004.09910, section 4.

B is the number of convolutions that are stacked at each level, C the channels of the first level.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class UNet(nn.Module):
    """An image in, a map of the same size out; sides must be multiples of 2 ** depth.

    Level i on the way down has C·2^i channels, and hands its features across to the level on the
    way up that doubles the size again::

        down 0 ──────────────────> up 0 → segment
          down 1 ──────────> up 1
            down 2 ──> up 2
                bottleneck

    Args:
        convolutions: B.
        base: C.
        depth: how often the image is halved.
        channels: of the image.
        maps: channels of the result.
        dropout: chance of a channel to be dropped after each convolution.
    """

    def __init__(
        self,
        convolutions: int,
        base: int,
        *,
        depth: int = 5,
        channels: int = 3,
        maps: int = 1,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()

        def stack(before: int, within: int, after: int) -> nn.Sequential:
            widths = [before, *[within] * (convolutions - 1), after]
            return nn.Sequential(*(Convolution(a, b, dropout) for a, b in pairwise(widths)))

        widths = [base << level for level in range(depth)]
        deepest = widths[-1]
        self.downs = nn.ModuleList(
            stack(before, width, width) for before, width in pairwise([channels, *widths])
        )
        self.halve = nn.MaxPool2d(2)
        self.bottleneck = stack(deepest, 2 * deepest, deepest)
        self.enlarge = nn.Upsample(scale_factor=2)
        self.ups = nn.ModuleList(
            stack(2 * width, width // 2, width // 2) for width in reversed(widths)
        )
        self.segment = nn.Conv2d(base // 2, maps, 1, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        across: list[Tensor] = []
        x = image
        for down in self.downs:
            x = down(x)
            across.append(x)
            x = self.halve(x)
        x = self.bottleneck(x)
        for up in self.ups:
            x = up(torch.cat([self.enlarge(x), across.pop()], dim=1))
        y: Tensor = self.segment(x)
        return y


class Convolution(nn.Sequential):
    """A 3×3 convolution with dropout of channels, instance norm and leaky ReLU."""

    def __init__(self, channels: int, features: int, dropout: float) -> None:
        super().__init__(
            nn.Conv2d(channels, features, 3, padding=1, bias=False),
            nn.Dropout2d(dropout),
            nn.InstanceNorm2d(features),
            nn.LeakyReLU(0.01),
        )
