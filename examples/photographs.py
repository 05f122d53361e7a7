"""The photographs that scikit-image includes, and noisy crops of them; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from skimage import data
from torch import Tensor

NOISE = 0.15
"""The standard deviation of the noise, for colours from 0 to 1."""


@dataclass(frozen=True)
class Noisy:
    """Photographs with noise.

    Attributes:
        image: the noisy photographs, (batch, 3, height, width).
        noise: the noise in them, of the same shape, which a network learns to find.
    """

    image: Tensor
    noise: Tensor


def training() -> list[Tensor]:
    """The photographs to train on, each (3, height, width)."""
    left, _, _ = data.stereo_motorcycle()
    return [_tensor(image) for image in (data.astronaut(), data.coffee(), data.rocket(), left)]


def unseen() -> Tensor:
    """A photograph of a cat, which is not among those of ``training``."""
    return _tensor(data.chelsea())


def add_noise(images: Tensor, generator: torch.Generator) -> Noisy:
    noise = NOISE * torch.randn(images.shape, generator=generator)
    return Noisy(images + noise, noise)


def crops(
    photographs: Sequence[Tensor], count: int, side: int, generator: torch.Generator
) -> Tensor:
    """Return ``count`` squares from random places of random photographs."""

    def below(bound: int) -> int:
        return int(torch.randint(bound, (), generator=generator))

    pieces = []
    for _ in range(count):
        photograph = photographs[below(len(photographs))]
        _, height, width = photograph.shape
        top, left = below(height - side + 1), below(width - side + 1)
        pieces.append(photograph[:, top : top + side, left : left + side])
    return torch.stack(pieces)


def _tensor(image: numpy.typing.NDArray[numpy.uint8]) -> Tensor:
    return torch.from_numpy(image.copy()).permute(2, 0, 1).float() / 255
