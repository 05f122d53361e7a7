"""What every contender trains: a model, a batch of it and how its weights are updated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.models.transformer import transformer
from examples.plain import Loss
from examples.unet import UNet

DEVICES = 2
"""Each of them a CPU device of one thread."""


@dataclass(frozen=True)
class Case:
    """A model and its training. The same seed makes the same of it in every process.

    Attributes:
        title: for people.
        model: makes it.
        shape: of a batch of inputs, and of its targets.
        microbatches: into how many a batch is split; they divide it.
        optimizer: from parameters.
        rounds: how many steps of each contender are timed by default.
        half: the submodule at which the second half of the work begins, for contenders that
            must be told. Of the U-Net's it is that with the slower half the fastest, as measured.
        loss: of an output and its target.
    """

    title: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    microbatches: int
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    rounds: int
    half: str
    loss: Loss = mse_loss

    def make(self) -> tuple[nn.Module, Tensor, Tensor]:
        """The model, a batch and its target."""
        torch.manual_seed(0)
        return self.model(), torch.rand(self.shape), torch.rand(self.shape)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def tiny() -> nn.Module:
    """So small that little is left but what a library itself costs."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


CASES = {
    "unet": Case(
        title="U-Net, 3 levels, Adam, batch 32×3×64×64",
        model=lambda: UNet(depth=3),
        shape=(32, 3, 64, 64),
        microbatches=8,
        optimizer=torch.optim.Adam,
        rounds=15,
        half="ups.0",
    ),
    "transformer": Case(
        title="transformer, 8 layers of width 512, SGD, batch 64 of 8 tokens",
        model=lambda: transformer(512, 8),
        shape=(64, 8, 512),
        microbatches=8,
        optimizer=sgd,
        rounds=15,
        half="4",
    ),
    "tiny": Case(
        title="tiny, 4 linear layers of width 8, SGD, batch 512",
        model=tiny,
        shape=(512, 8),
        microbatches=64,
        optimizer=sgd,
        rounds=60,
        half="2",
    ),
}
