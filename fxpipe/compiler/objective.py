"""The loss of a batch, made of the losses of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fxpipe.runtime.batch import MicroBatches

Loss = Callable[..., Any]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Objective:
    """What a step minimises.

    Micro-batch i has n_i samples and the loss l_i. The loss of the batch is Σ n_i l_i / Σ n_i for
    "mean", and Σ l_i for "sum".

    Attributes:
        loss: ``loss(output, *targets)`` → a scalar, or one loss per sample; None if the model
            returns its loss.
        reduction: whether losses of samples are averaged or added up.
    """

    loss: Loss | None = None
    reduction: Reduction = "mean"

    def __call__(self, output: Any, *targets: Any) -> Any:
        """Compute the loss of a micro-batch, a scalar; see ``joined``."""
        assert self.loss is not None
        value = self.loss(output, *targets)
        return self.joined(value, *targets) if getattr(value, "ndim", 0) else value

    def joined(self, losses: Any, *targets: Any) -> Any:
        """Average one loss per sample, or add them up."""
        return losses.mean() if self.reduction == "mean" else losses.sum()

    def counts(self, micro: MicroBatches) -> Sequence[float]:
        """What each micro-batch has of what the loss is a mean over: its samples."""
        return micro.sizes

    def weights(self, counts: Sequence[float]) -> Sequence[float]:
        """The factor of each micro-batch's loss, from the ``counts`` of all micro-batches."""
        if self.reduction == "sum":
            return [1.0] * len(counts)
        total = sum(counts)
        return [count / total for count in counts]

    @property
    def averages(self) -> bool:
        """Whether the losses of micro-batches are averaged by their samples."""
        return self.reduction == "mean"
