"""Mean and variance of a batch, gathered from its micro-batches, for BatchNorm's statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fxpipe.ir.traced import DeferredNorm


def gather(before: Tensor, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Add a micro-batch to the moments of the micro-batches before it.

    Args:
        before: (3, channels): the number of values so far, their mean, and the sum of their squared
            deviations.
        x: (samples, channels, …): the micro-batch; only its shape is used.
        mean: (channels): the mean of the micro-batch.
        variance: (channels): the unbiased variance of the micro-batch.
    """
    more = x.numel() / x.shape[1]
    return _merged(before, more, mean, variance * (more - 1))


def merged_moments(parts: Sequence[Tensor]) -> Tensor:
    """Merge several tensors of moments, in their order."""
    moments, *others = parts
    for part in others:
        moments = _merged(moments, *part.unbind())
    return moments


def _merged(before: Tensor, more: float | Tensor, mean: Tensor, more_squares: Tensor) -> Tensor:
    """Merge moments with those of ``more`` values by the pairwise update of Chan, Golub and LeVeque
    (1979), which avoids cancellation of large numbers."""
    count, old, squares = before.unbind()
    total, difference = count + more, mean - old
    return torch.stack(
        (
            total,
            old + difference * (more / total),
            squares + more_squares + difference.square() * (count * more / total),
        )
    )


def commit(
    norms: Sequence[DeferredNorm], state: Mapping[str, Tensor], written: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Turn the moments into running statistics, at the end of a step.

    Args:
        norms: the calls of BatchNorms, in order; one module may be called several times.
        state: name in the model → the buffer before the step.
        written: name → what the last micro-batch wrote, including the moments.

    Returns:
        Name → what the step writes to the model's buffers.
    """
    writes = dict(written)
    fresh: dict[str, Tensor] = {}
    for norm in norms:
        moments = writes.pop(norm.moments, None)
        if moments is None:
            continue
        count, mean, squares = moments.unbind()
        if norm.tracked is not None:
            fresh[norm.tracked] = fresh.get(norm.tracked, state[norm.tracked]) + 1
        variance = squares / (count - 1)
        for name, new in ((norm.running_mean, mean), (norm.running_var, variance)):
            old = fresh.get(name, state[name])
            fresh[name] = (old * (1 - norm.momentum) + new * norm.momentum).to(old.dtype)
    return writes | fresh
