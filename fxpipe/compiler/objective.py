"""The loss of a batch, made of the losses of its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from fxpipe.errors import InputError, told
from fxpipe.passes.tracing.loss_terms import Divisor
from fxpipe.runtime.batch import Batch, MicroBatches

Loss = Callable[..., Any]
Weight = Callable[..., Any]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Objective:
    """What a step minimises.

    With micro-batches i of n_i samples, losses l_i and weights w_i, the loss of the batch is
    Σ n_i l_i / Σ n_i for "mean", Σ l_i for "sum", and Σ w_i l_i / Σ w_i with a weight function, or
    with what a mean over targets that count is divided by, see ``weighed``.

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

    def weights(self, micro: MicroBatches) -> Sequence[float]:
        """What each micro-batch's loss is multiplied by.

        Raises:
            InputError: a weight is no number of at least 0, or all are 0.
        """
        if self.weight is None:
            if self.reduction == "sum":
                return [1.0] * len(micro)
            return micro.weights
        found = [self._weight(self.weight, micro.batch, leaves) for leaves in micro.leaves]
        total = sum(found)
        if not total:
            raise InputError(
                "loss_weight is 0 for every micro-batch, so that the batch has no loss; leave "
                "out batches of which nothing counts"
            )
        return [weight / total for weight in found]

    @cached_property
    def averages(self) -> bool:
        """Whether losses are averaged, and the caller does not say by what they are weighted."""
        return self.weight is None and self.reduction == "mean"

    def advice(self, wrong: Divisor, batch: Batch) -> str:
        """What to say where a loss is not that of the whole batch.

        Args:
            wrong: what divides it.
            batch: the call, whose inputs have names.
        """
        where = f"the loss ({wrong.line})" if wrong.line else "the loss"
        if wrong.sums:
            return (
                f'{where} is a sum over targets, and reduction="mean" averages it over '
                'micro-batches; give fxpipe.compile(..., reduction="sum"), which adds it up'
            )
        named = batch.names[wrong.leaves[0] if wrong.leaves else -1]
        told = (wrong.told or "({} != -100).sum()").replace("{}", named)
        given = "*target" if named.startswith("target[") else "target"
        if self.loss is None:
            given = ", ".join(dict.fromkeys(batch.call.heads))
        return (
            f"{where} is divided by what counts of the targets, as some are ignored, masked or "
            "weighted, and micro-batches have other shares in that than in the samples, by which "
            "their losses are averaged: the loss is not that of the whole batch, nor are its "
            "gradients. Say how much of it a micro-batch has: fxpipe.compile(..., "
            f"loss_weight=lambda {given}: {told})"
        )

    def _weight(self, weight: Weight, batch: Batch, leaves: Sequence[Any]) -> float:
        args, kwargs, targets = batch.unflatten(leaves)
        try:
            made = weight(*args, **kwargs) if self.loss is None else weight(*targets)
            number = float(made)
        except Exception as error:
            of = "inputs" if self.loss is None else "targets"
            raise InputError(
                f"loss_weight fails on a micro-batch ({told(error)}); give a "
                f"function from the {of} to a number, such as lambda y: (y != -100).sum()"
            ) from error
        if not 0 <= number < math.inf:
            raise InputError(
                f"loss_weight is {number} for a micro-batch; let it return a number of at least "
                "0, such as how many targets count"
            )
        return number


def weighed(
    terms: Sequence[Sequence[Divisor | None]],
    micro: MicroBatches,
    buffer: Callable[[str], Tensor],
) -> tuple[Sequence[float], Divisor | None]:
    """What each micro-batch's loss is multiplied by, so that the sum is the loss of the batch.

    Args:
        terms: micro-batch → what the terms of its loss are divided by.
        micro: the batch; its weights are the micro-batches' shares of the samples.
        buffer: name → buffer.

    Returns:
        The shares of the divisors, where all terms are means that have the same; else those of the
        samples, and a divisor that has others, if one does.
    """
    shares, parts = micro.weights, micro.leaves
    wanted: list[Sequence[float]] = []
    wrong: list[Divisor] = []
    for divisors in zip(*terms, strict=True):
        divisor = divisors[0]
        ratios = shares
        if divisor is not None and not _counts_all(divisor, micro.batch):
            ratios = _ratios(divisors, parts, shares, buffer)
        wanted.append(ratios)
        if divisor is not None and not _near(ratios, shares):
            # what is the same in every micro-batch may divide a mean over samples
            if divisor.told or not _near(ratios, [1 / len(parts)] * len(parts)):
                wrong.append(divisor)
    means = all(divisor is not None and divisor.told for divisor in terms[0])
    if means and wanted[0] and all(ratios == wanted[0] for ratios in wanted):
        return wanted[0], None
    return shares, wrong[0] if wrong else None


def _ratios(
    divisors: Sequence[Divisor | None],
    parts: Sequence[Sequence[Any]],
    shares: Sequence[float],
    buffer: Callable[[str], Tensor],
) -> Sequence[float]:
    """The shares of a term's divisors; none where they are not known. Those of the samples where
    nothing counts, as in a batch of ignored targets, or where it fails, as the run then will."""
    found: list[float] = []
    try:
        for divisor, leaves in zip(divisors, parts, strict=True):
            assert divisor is not None
            if divisor.made is None:
                return []
            given = [*(leaves[i] for i in divisor.leaves), *map(buffer, divisor.buffers)]
            found.append(divisor.made(*given))
        total = sum(found)
    except Exception:
        return shares
    if not math.isfinite(total):
        return []
    return [value / total for value in found] if total else shares


def _counts_all(divisor: Divisor, batch: Batch) -> bool:
    """Whether nothing is ignored, which a look at the whole batch tells soonest."""
    if divisor.ignored is None:
        return False
    return not bool((batch.leaves[divisor.leaves[0]] == divisor.ignored).any())


def _near(ratios: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two shares are one, up to rounding in single precision."""
    return len(ratios) == len(others) and all(
        math.isclose(one, other, rel_tol=1e-5) for one, other in zip(ratios, others, strict=True)
    )
