"""The models written here, small."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from benchmarks.models.amoebanet import AmoebaNetD
from benchmarks.models.branches import Branches
from benchmarks.models.cases import Batch, Case
from benchmarks.models.experts import MixtureOfExperts
from benchmarks.models.lstm import LSTMLanguageModel
from benchmarks.models.resnet import ResNet
from benchmarks.models.unet import UNet

WORDS = 29
CLASSES = 5
LENGTH = 6


def _images(side: int) -> Any:
    return lambda rows: Batch(
        (torch.randn(rows, 3, side, side),), target=torch.randint(CLASSES, (rows,))
    )


def _maps(rows: int) -> Batch:
    return Batch((torch.randn(rows, 3, 16, 16),), target=torch.randn(rows, 1, 16, 16))


def _tokens(rows: int) -> Batch:
    tokens = torch.randint(WORDS, (rows, LENGTH + 1))
    return Batch((tokens[:, :-1],), target=tokens[:, 1:])


def _branches(rows: int) -> Batch:
    text = torch.randint(WORDS, (rows, LENGTH))
    targets = torch.randint(CLASSES, (rows,)), torch.rand(rows, WORDS), torch.randn(rows)
    return Batch(
        (torch.randn(rows, 3, 8, 8), text), {"numbers": torch.randn(rows, 4)}, target=targets
    )


def next_words(scores: Tensor, words: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), words.flatten())


def all_three(output: tuple[dict[str, Tensor], Tensor], *targets: Tensor) -> Tensor:
    scores, price = output
    classes, words, paid = targets
    found = cross_entropy(scores["class"], classes) + cross_entropy(scores["words"], words)
    return found + mse_loss(price, paid)


CASES = (
    Case(
        "ResNet-101",
        lambda: ResNet(width=2, classes=CLASSES),
        _images(32),
        cross_entropy,
    ),
    Case(
        "U-Net (2, 4)",
        lambda: UNet(2, 4, depth=2, dropout=0.0),
        _maps,
        mse_loss,
    ),
    Case(
        "AmoebaNet-D (3, 16)",
        lambda: AmoebaNetD(3, 16, classes=CLASSES),
        _images(64),
        cross_entropy,
    ),
    Case("LSTM", lambda: LSTMLanguageModel(WORDS, 16), _tokens, next_words),
    Case("mixture of experts", lambda: MixtureOfExperts(WORDS, 16), _tokens, next_words),
    Case("branches", lambda: Branches(WORDS, 4, 16, CLASSES), _branches, all_three),
)
