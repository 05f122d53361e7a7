"""The extension that weights the losses of micro-batches by a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fxpipe.compiler.objective import Objective
from fxpipe.compiler.options import Options
from fxpipe.errors import InputError, told
from fxpipe.extend import Extension
from fxpipe.runtime.batch import Batch, MicroBatches

Weight = Callable[..., Any]


@dataclass(frozen=True)
class LossWeight(Extension):
    """Weight the losses of micro-batches, for a mean over something else than samples, such as
    ``(losses * mask).sum() / mask.sum()``.

    It takes precedence over weights that are read from the loss itself.

    Args:
        weight: ``weight(*targets)`` → the micro-batch's weight in that mean, such as
            ``lambda target, mask: mask.sum()``. If the model returns the loss, the function gets
            the model's inputs.

    Raises:
        InputError: the weight is no function.
    """

    weight: Weight

    def __post_init__(self) -> None:
        if not callable(self.weight):
            raise InputError(
                f"the weight of LossWeight is {self.weight!r}; give a function from the targets to "
                "a number, such as lambda y: (y != -100).sum()"
            )

    def options(self, options: Options) -> Options:
        """The options with this weight in the objective. Raises InputError with a sum."""
        objective = options.objective
        if objective.reduction == "sum":
            raise InputError(
                'reduction is "sum" and there is a LossWeight, which says how losses are averaged; '
                "leave one of them out"
            )
        return replace(options, objective=Weighted(objective.loss, weight=self.weight))


@dataclass(frozen=True)
class Weighted(Objective):
    """An objective with weights: the loss of the batch is Σ w_i l_i / Σ w_i.

    Attributes:
        weight: ``weight(*targets)`` → the weight of a micro-batch, such as how many of its
            targets are not masked. It gets the model's inputs if the model returns its loss.
    """

    weight: Weight = field(kw_only=True)

    def joined(self, losses: Any, *targets: Any) -> Any:
        """The sum divided by the micro-batch's weight, so that the loss of the batch is the sum
        over all samples divided by the batch's weight."""
        return losses.sum() / self.weight(*targets)

    @property
    def averages(self) -> bool:
        """Never: they are averaged by the weights."""
        return False

    def counts(self, micro: MicroBatches) -> Sequence[float]:
        """The weight of each micro-batch. Raises InputError if one is not a number of at least
        0, or all are 0."""
        return [self._weight(micro.batch, leaves) for leaves in micro.leaves]

    def weights(self, counts: Sequence[float]) -> Sequence[float]:
        """The share of each micro-batch. Raises InputError if all counts are 0."""
        if not sum(counts):
            raise InputError(
                "the LossWeight is 0 for every micro-batch, so that the batch has no loss; leave "
                "out batches of which nothing counts"
            )
        return super().weights(counts)

    def _weight(self, batch: Batch, leaves: Sequence[Any]) -> float:
        args, kwargs, targets = batch.unflatten(leaves)
        try:
            own = self.loss is None
            number = float(self.weight(*args, **kwargs) if own else self.weight(*targets))
        except Exception as error:
            of = "inputs" if self.loss is None else "targets"
            raise InputError(
                f"the LossWeight fails on a micro-batch ({told(error)}); give a function from the "
                f"{of} to a number, such as lambda y: (y != -100).sum()"
            ) from error
        if not 0 <= number < math.inf:
            raise InputError(
                f"the LossWeight is {number} for a micro-batch; let it return a number of at least "
                "0, such as how many targets count"
            )
        return number
