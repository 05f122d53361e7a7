"""Models, data, optimizers and pipes for steps that overlap without a flush."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe
from examples.unet import UNet
from fxpipe.ir.recipe import find_recipe
from fxpipe.runtime.weights.optimizer import OptimizerLike
from tests.helpers.own_optimizers import Nesterov, Orthogonal, groups
from tests.helpers.profiles import LEVELS
from tests.models.test_split_training import Transformer, scores
from tests.oracles.delayed_loop import MSE, Batch, Factory

OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "groups": lambda p: torch.optim.AdamW(groups(p), lr=1e-2),
    "foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "own": lambda p: Nesterov(p, lr=0.05),
}
MORE: dict[str, Factory] = {
    "orthogonal": Orthogonal,
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}
SGD, ADAMW = OPTIMIZERS["sgd"], OPTIMIZERS["adamw"]

LOSSES: dict[str, Callable[..., Tensor]] = {"mlp": MSE, "unet": MSE, "transformer": scores}
"""Case → what it is trained with."""


def make(case: str, batches: int, samples: int) -> tuple[nn.Module, list[Batch]]:
    """A model in double precision, and batches for it; the same ones at each call."""
    torch.manual_seed(0)
    if case == "mlp":
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)]
        model: nn.Module = nn.Sequential(*blocks)
        data = [(torch.randn(samples, 6), torch.randn(samples, 6)) for _ in range(batches)]
    elif case == "unet":
        model = UNet(channels=1, base=2, depth=LEVELS)
        image = samples, 1, 8, 8
        data = [(torch.randn(image), torch.randn(image)) for _ in range(batches)]
    else:
        model = Transformer()
        data = [
            (torch.randint(11, (samples, 5)), torch.randint(11, (samples, 5)))
            for _ in range(batches)
        ]
    model.double()
    return model, [(_double(x), _double(y)) for x, y in data]


def compiled(
    model: nn.Module,
    devices: int,
    microbatches: int,
    optimizer: OptimizerLike = SGD,
    *,
    schedule: str | fxpipe.Schedule | fxpipe.Recipe = "2bw",
    loss: Callable[..., Tensor] | None = MSE,
    **options: Any,
) -> fxpipe.Pipeline:
    """A pipe with two versions of the weights, or under another schedule.

    Layers of a sequence are cut evenly: what they are measured to take would leave stages without
    parameters now and then, and these have no versions.
    """
    named = find_recipe(schedule) if isinstance(schedule, str) else schedule
    stages = named.stages if isinstance(named, fxpipe.Schedule) else named.stages(devices)
    if isinstance(model, nn.Sequential) and len(model) >= stages:
        even = [str(stage * len(model) // stages) for stage in range(1, stages)]
        options.setdefault("partition", even)
    return fxpipe.compile(
        model,
        devices,
        schedule=schedule,
        microbatches=microbatches,
        loss=loss,
        optimizer=optimizer,
        **options,
    )


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
