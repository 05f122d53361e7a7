"""The loss of a batch, made of the losses of its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fxpipe.errors import InputError
from fxpipe.runtime.batch import Batch

Loss = Callable[..., Any]
Weight = Callable[..., Any]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Objective:
    """What a step minimises.

    With micro-batches i of n_i samples, losses l_i and weights w_i, the loss of the batch is
    Σ n_i l_i / Σ n_i for "mean", Σ l_i for "sum", and Σ w_i l_i / Σ w_i with a weight function.

    Attributes:
        loss: ``loss(output, *targets)``, a scalar or one loss per sample; None where the model
            returns its loss.
        reduction: whether losses of samples are averaged or added up.
        weight: ``weight(*targets)``, or of the model's inputs where the model returns its loss:
            what a micro-batch counts for, such as its number of targets that are not masked.
    """

    loss: Loss | None = None
    reduction: Reduction = "mean"
    weight: Weight | None = None

    def __call__(self, output: Any, *targets: Any) -> Any:
        """The loss function's value as one number; losses of samples are reduced.

        With weights they are added up and divided by the micro-batch's weight, which makes the
        loss of the batch their sum divided by the batch's weight.
        """
        assert self.loss is not None
        value = self.loss(output, *targets)
        if not getattr(value, "ndim", 0):
            return value
        if self.weight is not None:
            return value.sum() / self.weight(*targets)
        return value.mean() if self.reduction == "mean" else value.sum()

    def weights(self, batch: Batch, parts: Sequence[Sequence[Any]]) -> list[float]:
        """What each micro-batch's loss is multiplied by.

        Args:
            batch: the batch.
            parts: the leaves of each micro-batch.

        Raises:
            InputError: a weight is no number of at least 0, or all are 0.
        """
        if self.weight is None:
            if self.reduction == "sum":
                return [1.0] * len(parts)
            return [size / batch.size for size in batch.sizes(len(parts))]
        found = [self._weight(self.weight, batch, leaves) for leaves in parts]
        total = sum(found)
        if not total:
            raise InputError(
                "loss_weight is 0 for every micro-batch, so that the batch has no loss; leave "
                "out batches of which nothing counts"
            )
        return [weight / total for weight in found]

    def _weight(self, weight: Weight, batch: Batch, leaves: Sequence[Any]) -> float:
        args, kwargs, targets = batch.unflatten(leaves)
        try:
            made = weight(*args, **kwargs) if self.loss is None else weight(*targets)
            number = float(made)
        except Exception as error:
            of = "inputs" if self.loss is None else "targets"
            raise InputError(
                f"loss_weight fails on a micro-batch ({type(error).__name__}: {error}); give a "
                f"function from the {of} to a number, such as lambda y: (y != -100).sum()"
            ) from error
        if not 0 <= number < math.inf:
            raise InputError(
                f"loss_weight is {number} for a micro-batch; let it return a number of at least "
                "0, such as how many targets count"
            )
        return number
