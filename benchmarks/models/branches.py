"""A network with several inputs and outputs, whose branches meet, part and meet again."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Branches(nn.Module):
    """An image, words and some numbers in; a class, a text's scores and a price out.

    Args:
        words: of the vocabulary.
        numbers: how many are given with each sample.
        width: of every branch.
        classes: how many.
    """

    def __init__(self, words: int, numbers: int, width: int, classes: int) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.read = nn.EmbeddingBag(words, width)
        self.count = nn.Sequential(nn.Linear(numbers, width), nn.Tanh())
        self.meet = nn.Sequential(nn.Linear(3 * width, width), nn.GELU())
        self.again = nn.Sequential(nn.Linear(2 * width, width), nn.GELU())
        self.classes = nn.Linear(width, classes)
        self.words = nn.Linear(2 * width, words)
        self.price = nn.Linear(width, 1)

    def forward(
        self, image: Tensor, text: Tensor, *, numbers: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """``({"class": (batch, classes), "words": (batch, words)}, price (batch,))``."""
        seen, read, counted = self.look(image), self.read(text), self.count(numbers)
        met = self.meet(torch.cat([seen, read, counted], dim=1))
        again = self.again(torch.cat([met, counted * read], dim=1))
        price = self.price(again + seen).squeeze(1)
        return {
            "class": self.classes(met),
            "words": self.words(torch.cat([again, read], dim=1)),
        }, price
