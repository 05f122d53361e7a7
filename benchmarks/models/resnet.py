"""ResNet-101: He et al., arXiv 1512.03385, with the stride in the 3×3 convolution."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

EXPANSION = 4
"""How much wider a bottleneck's output is than its 3×3 convolution."""


class ResNet(nn.Module):
    """A classifier of images.

    Args:
        blocks: bottlenecks in each of the stages; each further stage halves the image.
        width: of the first stage; each further one is twice as wide.
        classes: how many.
    """

    def __init__(
        self, blocks: Sequence[int] = (3, 4, 23, 3), width: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        layers: list[nn.Module] = []
        channels = width
        for level, count in enumerate(blocks):
            for index in range(count):
                stride = 2 if level and not index else 1
                layers.append(Bottleneck(channels, width << level, stride))
                channels = EXPANSION * width << level
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
        )

    def forward(self, image: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(self.stem(image)))
        return y


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        after = EXPANSION * width
        self.residual = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after)
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.residual(x) + self.shortcut(x))
        return y
