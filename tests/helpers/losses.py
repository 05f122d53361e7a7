"""A small net, targets of which some are ignored, and a loss beside that of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxpipe
from tests.oracles import loop

IGNORED = -100


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double()


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, dtype=torch.float64, generator=random)
    return x, torch.randint(5, (count,), generator=random)


def counted(target: Tensor) -> Tensor:
    return (target != IGNORED).sum()


def assert_whole(
    loss: Callable[..., Tensor],
    x: Tensor,
    y: Any,
    microbatches: int,
    whole: Callable[..., Tensor] | None = None,
    **options: Any,
) -> None:
    """The pipe's loss and gradients are those of ``whole`` on the batch, which is not split."""
    model = net()
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, microbatches=microbatches, loss=loss, **options) as p:
        made = p.step(x, target=y)
    targets = y if isinstance(y, tuple) else (y,)
    expected = (whole or loss)(alone(x), *targets)
    expected.backward()
    torch.testing.assert_close(made, expected.detach())
    loop.assert_same(loop.gradients(model), loop.gradients(alone), 1e-12)


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    kept = target != IGNORED
    losses = cross_entropy(output, target.clamp(min=0), reduction="none")
    return (losses * kept).sum() / kept.sum()
