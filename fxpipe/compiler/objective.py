"""The loss of a batch, made of the losses of its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from torch import Tensor, nn

from fxpipe.errors import InputError, told
from fxpipe.ir.traced import Traced
from fxpipe.passes.tracing.loss_terms import Divisor
from fxpipe.runtime.batch import Batch, MicroBatches

Loss = Callable[..., Any]
Weight = Callable[..., Any]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Objective:
    """What a step minimises.

    Micro-batch i has n_i samples, the loss l_i and the weight w_i. The loss of the batch is
    Σ n_i l_i / Σ n_i for "mean", Σ l_i for "sum", and Σ w_i l_i / Σ w_i with a weight function.
    The last holds, too, if the loss is a mean over targets that are not ignored; w_i is then their
    number, see ``weighed``.

    Attributes:
        loss: ``loss(output, *targets)``, a scalar or one loss per sample; None where the model
            returns its loss.
        reduction: whether losses of samples are averaged or added up.
        weight: ``weight(*targets)`` → the weight of a micro-batch, such as how many of its
            targets are not masked. It gets the model's inputs where the model returns its loss.
    """

    loss: Loss | None = None
    reduction: Reduction = "mean"
    weight: Weight | None = None

    def __call__(self, output: Any, *targets: Any) -> Any:
        """The loss of a micro-batch as a scalar; one loss per sample is reduced to it.

        With weights, the samples' losses are added up and divided by the micro-batch's weight, so
        that the loss of the batch is the sum over all samples divided by the batch's weight.
        """
        assert self.loss is not None
        value = self.loss(output, *targets)
        if not getattr(value, "ndim", 0):
            return value
        if self.weight is not None:
            return value.sum() / self.weight(*targets)
        return value.mean() if self.reduction == "mean" else value.sum()

    def counts(self, micro: MicroBatches) -> Sequence[float]:
        """How much each micro-batch's loss counts.

        Raises:
            InputError: a weight is not a number of at least 0.
        """
        if self.weight is None:
            return micro.sizes
        return [self._weight(self.weight, micro.batch, leaves) for leaves in micro.leaves]

    def weights(self, counts: Sequence[float]) -> Sequence[float]:
        """What each micro-batch's loss is multiplied by, where these are the ``counts`` of all.

        Raises:
            InputError: all weights are 0.
        """
        if self.reduction == "sum":
            return [1.0] * len(counts)
        total = sum(counts)
        if not total:
            raise InputError(
                "loss_weight is 0 for every micro-batch, so that the batch has no loss; leave "
                "out batches of which nothing counts"
            )
        return [count / total for count in counts]

    @cached_property
    def averages(self) -> bool:
        """Whether losses are averaged by samples, for the caller gives no weight function."""
        return self.weight is None and self.reduction == "mean"

    def advice(self, wrong: Divisor, batch: Batch) -> str:
        """The warning that losses of micro-batches, divided by this, do not average to the loss of
        the batch, from which it has the names of inputs."""
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
            given = ", ".join(dict.fromkeys(batch.arguments))
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


Divided = Sequence[float] | None
"""Micro-batch → what a term of its loss is divided by; empty where that is not known. None where
the term's divisors have the shares of the samples."""


def weighed(
    terms: Sequence[Divisor | None], divided: Sequence[Divided], shares: Sequence[float]
) -> tuple[Sequence[float], Divisor | None]:
    """What each micro-batch's loss is multiplied by, so that the sum is the loss of the batch.

    Args:
        terms: what each term of a micro-batch's loss is divided by.
        divided: term → the values of that.
        shares: micro-batch → its share of the samples.

    Returns:
        The weights, and a divisor to warn of, or None. Where the divisors of all terms have the
        same shares, such as of the targets that are not ignored, the weights are these shares.
        Else they are the shares of the samples, and a divisor with other shares is returned.
    """
    wanted: list[Sequence[float]] = []
    wrong: list[Divisor] = []
    for divisor, values in zip(terms, divided, strict=True):
        ratios = _ratios(values, shares)
        wanted.append(ratios)
        if divisor is not None and not _near(ratios, shares):
            # a divisor that is the same in every micro-batch leaves a mean over samples one
            if divisor.told or not _near(ratios, [1 / len(shares)] * len(shares)):
                wrong.append(divisor)
    means = all(divisor is not None and divisor.told for divisor in terms)
    if means and wanted[0] and all(ratios == wanted[0] for ratios in wanted):
        return wanted[0], None
    return shares, wrong[0] if wrong else None


def divided(
    terms: Sequence[Sequence[Divisor | None]],
    micro: MicroBatches,
    buffer: Callable[[str], Tensor],
    *,
    alone: bool,
) -> list[Divided]:
    """The values of what the ``terms`` of each micro-batch's loss are divided by.

    Where these are all micro-batches, ``alone``, nothing is counted if no target is ignored.
    """
    return [
        None
        if own[0] is None or (alone and _counts_all(own[0], micro.batch))
        else _values(own, micro.leaves, buffer)
        for own in zip(*terms, strict=True)
    ]


def together(parts: Sequence[Sequence[Divided]]) -> list[Divided]:
    """The values of all replicas' micro-batches, from those of each replica."""
    found: list[Divided] = []
    for term in zip(*parts, strict=True):
        values = [own for own in term if own is not None]
        if len(values) < len(term):
            found.append(None)
        else:
            found.append([each for own in values for each in own] if all(values) else [])
    return found


def with_weights(
    micro: MicroBatches,
    objective: Objective,
    terms: Sequence[Divisor | None],
    parts: Sequence[tuple[Sequence[float], Sequence[Divided]]],
) -> tuple[MicroBatches, Divisor | None]:
    """The same micro-batches of this replica, each with the weight of its loss in that of all
    replicas' batches, and a divisor to warn of, or None.

    Args:
        terms: what each term of a loss is divided by.
        parts: replica → how much each of its micro-batches counts, and what ``divided`` returns for
            them; empty where losses are weighted by these counts alone.
    """
    weights = objective.weights([count for own, _ in parts for count in own])
    every, wrong = [own for _, own in parts], None
    if every[0] and len({*map(len, every)}) == 1:
        weights, wrong = weighed(terms, together(every), weights)
    if len(parts) == 1:
        return replace(micro, weights=weights), wrong
    cut = [weights[first : first + len(micro)] for first in range(0, len(weights), len(micro))]
    return replace(micro, weights=cut[micro.replica], all_weights=cut), wrong


def _values(
    divisors: Sequence[Divisor | None],
    parts: Sequence[Sequence[Any]],
    buffer: Callable[[str], Tensor],
) -> Divided:
    """What a term is divided by in each micro-batch. None where computing it fails, because the run
    will then fail with its own error."""
    found: list[float] = []
    try:
        for divisor, leaves in zip(divisors, parts, strict=True):
            assert divisor is not None
            if divisor.made is None:
                return []
            given = [*(leaves[i] for i in divisor.leaves), *map(buffer, divisor.buffers)]
            found.append(float(divisor.made(*given)))
    except Exception:
        return None
    return found


def _ratios(values: Divided, shares: Sequence[float]) -> Sequence[float]:
    """Each micro-batch's share of a term's divisors; empty where they are not known. The shares of
    the samples where all divisors are 0, as in a batch of ignored targets."""
    if values is None:
        return shares
    total = sum(values)
    if not values or not math.isfinite(total):
        return []
    return [value / total for value in values] if total else shares


def _counts_all(divisor: Divisor, batch: Batch) -> bool:
    """Whether no target of the batch is ignored; quicker than counting for each micro-batch."""
    if divisor.ignored is None:
        return False
    return not bool((batch.leaves[divisor.leaves[0]] == divisor.ignored).any())


def _near(ratios: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two lists of shares are equal up to rounding in single precision."""
    return len(ratios) == len(others) and all(
        math.isclose(one, other, rel_tol=1e-5) for one, other in zip(ratios, others, strict=True)
    )


def known_buffers(traced: Traced, model: nn.Module) -> Callable[[str], Tensor]:
    """Name → buffer or constant that says how losses are weighted, for ``divided``.

    Raises:
        InputError: the buffer has no data.
    """

    def buffer(name: str) -> Tensor:
        found = traced.constants.get(name)
        if found is None:
            found = model.get_buffer(name)
        if found.is_meta:
            raise InputError(
                f"buffer {name!r} says how losses are weighted, which every rank has to know, "
                'and has no data here; make it with data (device="cpu") where the model is built'
            )
        return found

    return buffer
