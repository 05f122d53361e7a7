"""What every contender trains: a model, a batch of it and how its weights are updated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.models.transformer import transformer
from examples.plain import Loss
from examples.unet import UNet

DEVICES = 2
"""Each of them a CPU device of one thread."""


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": sgd,
    "Adam": torch.optim.Adam,
}


@dataclass(frozen=True)
class Case:
    """A model and its training. The same seed makes the same of it in every process.

    Attributes:
        net: the model, for people.
        batch: a batch, for people.
        model: makes it.
        shape: of a batch of inputs, and of its targets.
        microbatches: into how many a batch is split; they divide it.
        update: the name of its optimizer.
        rounds: how many steps of each contender are timed by default.
        cuts: the submodules at which the second and later devices' work begins, for contenders
            that must be told. Of the U-Net's on two devices it is that with the slower half the
            fastest, as measured.
        loss: of an output and its target.
        data: makes a batch and its target; by default they are random numbers of ``shape``.
        parts: divides a model into a module for each device, for contenders that cannot do so.
            Each takes what the one before it gives, a value or a tuple of them.
    """

    net: str
    batch: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    microbatches: int
    update: str
    rounds: int
    cuts: tuple[str, ...]
    loss: Loss = mse_loss
    data: Callable[[], tuple[Tensor, Tensor]] | None = None
    parts: Callable[[Any], list[nn.Module]] | None = None

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.net}, {self.update}, batch {self.batch}"

    @property
    def optimizer(self) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
        """Makes the optimizer of parameters."""
        return OPTIMIZERS[self.update]

    @property
    def devices(self) -> int:
        """How many there are."""
        return len(self.cuts) + 1

    def make(self, device: str = "cpu") -> tuple[nn.Module, Tensor, Tensor]:
        """The model, built on a device, a batch and its target."""
        torch.manual_seed(0)
        with torch.device(device):
            model = self.model()
        x, y = self.data() if self.data else (torch.rand(self.shape), torch.rand(self.shape))
        return model, x, y


def tiny() -> nn.Module:
    """So small that little is left but what a library itself costs."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


CASES = {
    "unet": Case(
        net="U-Net, 3 levels",
        batch="32×3×64×64",
        model=lambda: UNet(depth=3),
        shape=(32, 3, 64, 64),
        microbatches=8,
        update="Adam",
        rounds=15,
        cuts=("ups.0",),
    ),
    "transformer": Case(
        net="transformer, 8 layers of width 512",
        batch="64 of 8 tokens",
        model=lambda: transformer(512, 8),
        shape=(64, 8, 512),
        microbatches=8,
        update="SGD",
        rounds=15,
        cuts=("4",),
    ),
    "tiny": Case(
        net="tiny, 4 linear layers of width 8",
        batch="512",
        model=tiny,
        shape=(512, 8),
        microbatches=64,
        update="SGD",
        rounds=60,
        cuts=("2",),
    ),
}

QUARTERS = {"unet": ("downs.1", "ups.0", "ups.1"), "transformer": ("2", "4", "6")}
"""Case → its cuts on four devices."""

RESIDENT = {
    f"{name}, {optimizer}, {len(cuts) + 1} devices": replace(
        CASES[name], cuts=cuts, update=optimizer
    )
    for name in QUARTERS
    for cuts in (CASES[name].cuts, QUARTERS[name])
    for optimizer in OPTIMIZERS
}
"""Those of ``benchmarks.resident``."""
