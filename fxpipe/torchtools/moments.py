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
        moments: the name of the state in which ``gather`` adds up its moments; zeros before each
            step.
        running_mean: the name of the running mean's buffer in the model.
        running_var: the name of the running variance's buffer.
        tracked: the name of the buffer that counts updates, if there is one.
        momentum: the weight of the new statistics; None for the average over all updates.
    """

    moments: str
    running_mean: str
    running_var: str
    tracked: str | None
    momentum: float | None


def gather(before: Tensor, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Add a micro-batch to the moments of those before it.

    Args:
        before: (3, channels): the count of values so far, their mean, the sum of their squared
            deviations.
        x: (samples, channels, …): the micro-batch, of which only the shape is used.
        mean: (channels): of the micro-batch.
        variance: (channels): of the micro-batch, unbiased.
    """
    more = x.numel() / x.shape[1]
    return _merged(before, more, mean, variance * (more - 1))


def merged(parts: Sequence[Tensor]) -> Tensor:
    """The moments of all that several tensors of moments were gathered from, in their order."""
    found, *others = parts
    for part in others:
        found = _merged(found, *part.unbind())
    return found


def _merged(before: Tensor, more: float | Tensor, mean: Tensor, more_squares: Tensor) -> Tensor:
    """Moments with those of ``more`` values, by the pairwise update of Chan, Golub and LeVeque
    (1979), which subtracts no large numbers.

    The variance of all depends on the means of both as well as on their variances.
    """
    count, old, squares = before.unbind()
    total, difference = count + more, mean - old
    return torch.stack(
        (
            total,
            old + difference * (more / total),
            squares + more_squares + difference.square() * (count * more / total),
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
    """Turn the moments into running statistics, at the end of a step.

    Args:
        norms: the calls of BatchNorms, in order; one module may be called several times.
        state: name in the model → buffer as it was before the step.
        written: name → what the last micro-batch wrote, the moments included.

    Returns:
        Name → what the step writes to the model's buffers.
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
            # in float64, as BatchNorm itself computes it: an integer tensor would give a float32
            factor = 1 / updates.double() if factor is None else factor
        assert factor is not None
        for name, new in (
            (norm.running_mean, mean),
            (norm.running_var, squares / (count - 1)),
        ):
            old = fresh.get(name, state[name])
            fresh[name] = (old * (1 - factor) + new * factor).to(old.dtype)
    return found | fresh
