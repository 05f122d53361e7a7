"""Mean and variance of a batch, gathered from its micro-batches, for BatchNorm's statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeferredNorm:
    """One call of a BatchNorm, whose running statistics are updated once a step.

    Attributes:
        moments: the state that gathers its moments, see ``gather``; zeros before each step.
        running_mean: the name of that buffer in the model.
        running_var: the same.
        tracked: the name of the buffer that counts updates, if there is one.
        momentum: the weight of the new statistics; None for the average over all updates.
    """

    moments: str
    running_mean: str
    running_var: str
    tracked: str | None
    momentum: float | None


def gather(before: Tensor, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Add a micro-batch to the moments: its means differ, so the variances alone do not do.

    The pairwise update of Chan, Golub and LeVeque (1979), which subtracts no large numbers.

    Args:
        before: (3, channels): how many values so far, their mean, their squared deviations.
        x: (samples, channels, …): the micro-batch, for its shape alone.
        mean: (channels): of the micro-batch.
        variance: (channels): of the micro-batch, unbiased.
    """
    more = x.numel() / x.shape[1]
    count, old, squares = before.unbind()
    total = count + more
    difference = mean - old
    return torch.stack(
        (
            total,
            old + difference * (more / total),
            squares + variance * (more - 1) + difference.square() * (count * more / total),
        )
    )


def measured(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of each channel: dimension 1 of (samples, channels, …)."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    variance, mean = torch.var_mean(x.detach(), dims)
    return mean, variance


def commit(
    norms: Sequence[DeferredNorm], state: Mapping[str, Tensor], written: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What a step writes to the model's buffers: the moments become running statistics.

    Args:
        norms: the calls, in order; one module may have several.
        state: name in the model → its buffers before the step.
        written: name → what the last micro-batch wrote, the moments among them.
    """
    found = dict(written)
    fresh: dict[str, Tensor] = {}
    for norm in norms:
        moments = found.pop(norm.moments, None)
        if moments is None:
            continue
        count, mean, squares = moments.unbind()
        factor: float | Tensor | None = norm.momentum
        if norm.tracked is not None:
            updates = fresh.get(norm.tracked, state[norm.tracked]) + 1
            fresh[norm.tracked] = updates
            # in float64 as BatchNorm's own: an integer tensor would divide to a float32
            factor = 1 / updates.double() if factor is None else factor
        assert factor is not None
        for name, new in (
            (norm.running_mean, mean),
            (norm.running_var, squares / (count - 1)),
        ):
            old = fresh.get(name, state[name])
            fresh[name] = (old * (1 - factor) + new * factor).to(old.dtype)
    return found | fresh
