"""Warn of an optimizer whose update of one parameter depends on the gradients of others.

d = estimate over the gradients of all parameters     Prodigy, D-Adaptation
parameter -= d * its own gradient

Each stage steps by itself, so its estimate would be one over its own parameters.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.runtime.weights.live import settings
from fxpipe.torchtools.accelerator import random_kept
from fxpipe.torchtools.optimizers import class_of, copy_alone
from fxpipe.torchtools.source import users_level

_STEPS = 2, 40
"""How many steps are tried, all downhill. The second number only where steps change settings of a
group, as an estimate that the first ones begin."""

_SIZE = 4
"""The rows and columns of a parameter that is tried."""


def warn_if_coupled(optimizer: Optimizer, stages: int) -> None:
    """Warn if an optimizer, which is to step so many stages by themselves, computes updates across
    parameters."""
    if stages > 1 and is_coupled(optimizer):
        warnings.warn(
            f"{class_of(optimizer)} computes the update of a parameter from the gradients of other "
            "ones, too, as by an estimate or a norm over all, and each stage steps by itself: its "
            "updates are not those of the model on one device. Leave out optimizer=, and step it "
            "yourself: pipe.step(...), optimizer.step(), optimizer.zero_grad()",
            stacklevel=users_level(),
        )


def is_coupled(optimizer: Optimizer) -> bool:
    """Whether the update of one parameter depends on the gradients of others, in a few steps of a
    copy of the optimizer on small parameters. False if it cannot step these."""
    with random_kept(()), torch.inference_mode(False), torch.no_grad(), suppress(Exception):
        for steps in _STEPS:
            alone, changes = _tried(optimizer, steps, 1.0)
            among, _ = _tried(optimizer, steps, -8.0)
            if not all(map(_same, alone, among)):
                return True
            if not changes:
                break
    return False


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal; NaN, where steps are too long, equals NaN."""
    return torch.equal(first.nan_to_num(), second.nan_to_num())


def _tried(optimizer: Optimizer, steps: int, scale: float) -> tuple[list[Tensor], bool]:
    """The first parameter of each group after some steps, and whether these change settings of a
    group. The gradients of the other parameters, which are as many and of the same size, are
    multiplied by ``scale`` in every other step."""
    torch.manual_seed(0)
    pairs = [
        [nn.Parameter(torch.randn(_SIZE, _SIZE)) for _ in range(2)] for _ in optimizer.param_groups
    ]
    groups: list[dict[str, Any]] = [
        {**settings(group), "params": pair}
        for group, pair in zip(optimizer.param_groups, pairs, strict=True)
    ]
    stepped = copy_alone(optimizer, groups)
    slopes = [(torch.randn(_SIZE, _SIZE), torch.randn(_SIZE, _SIZE)) for _ in pairs]
    before = [repr(settings(group)) for group in groups]
    for step in range(steps):
        for (first, other), slope in zip(pairs, slopes, strict=True):
            first.grad, other.grad = slope[0].clone(), slope[1] * (scale if step % 2 else 1.0)
        torch.manual_seed(0)  # for what the step draws
        type(optimizer).step(stepped)
    return [first for first, _ in pairs], [repr(settings(group)) for group in groups] != before
