"""The loss of a batch, made of the losses of its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.ir.traced import Traced
from fxpipe.passes.tracing.loss_terms import Divisor
from fxpipe.runtime.batch import Batch, MicroBatches
from fxpipe.torchtools.copies import current_copy

Loss = Callable[..., Any]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Objective:
    """What a step minimises.

    Micro-batch i has n_i samples and the loss l_i. The loss of the batch is Σ n_i l_i / Σ n_i for
    "mean", and Σ l_i for "sum". If the loss is a mean over targets that are not ignored, n_i is the
    number of these, see ``weighed``.

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

    def advice(self, wrong: Divisor, batch: Batch) -> str:
        """The warning that the losses of micro-batches, which are divided by ``wrong``, do not
        average to the loss of the batch."""
        where = f"the loss ({wrong.line})" if wrong.line else "the loss"
        if wrong.sums:
            return (
                f'{where} is a sum over targets, and reduction="mean" averages it over '
                'micro-batches; give fxpipe.compile(..., reduction="sum"), which adds it up'
            )
        name = batch.names[wrong.leaves[0] if wrong.leaves else -1]
        count = (wrong.told or "({} != -100).sum()").replace("{}", name)
        arguments = "*target" if name.startswith("target[") else "target"
        if self.loss is None:
            arguments = ", ".join(dict.fromkeys(batch.arguments))
        return (
            f"{where} is a mean over targets of which some are ignored, masked or weighted. The "
            "losses of micro-batches are averaged by their samples, which are not in proportion to "
            "these targets: the loss is not that of the whole batch, nor are its gradients. Give "
            "the weight of a micro-batch in that mean: fxpipe.compile(..., "
            f"extensions=[fxpipe.LossWeight(lambda {arguments}: {count})])"
        )


Divided = Sequence[float] | None
"""Micro-batch → the value that a term of its loss is divided by; empty if that is not known. None
if these values are in proportion to the samples."""


def weighed(
    terms: Sequence[Divisor | None], divided: Sequence[Divided], shares: Sequence[float]
) -> tuple[Sequence[float], Divisor | None]:
    """Weigh the losses of micro-batches so that their sum is the loss of the batch.

    Args:
        terms: the divisor of each term of a micro-batch's loss.
        divided: term → the values of its divisor.
        shares: micro-batch → its share of the samples.

    Returns:
        The factor of each micro-batch's loss, and a divisor to warn of, or None. If the divisors of
        all terms have the same shares, such as of the targets that are not ignored, the factors are
        these shares. Else they are the shares of the samples, and a divisor with other shares is
        returned.
    """
    ratios_of: list[Sequence[float]] = []
    wrong: list[Divisor] = []
    for divisor, values in zip(terms, divided, strict=True):
        ratios = _ratios(values, shares)
        ratios_of.append(ratios)
        if divisor is not None and not _near(ratios, shares):
            # with the same divisor in every micro-batch, a mean over samples stays one
            if divisor.told or not _near(ratios, [1 / len(shares)] * len(shares)):
                wrong.append(divisor)
    means = all(divisor is not None and divisor.told for divisor in terms)
    first = ratios_of[0]
    if means and first and all(ratios == first for ratios in ratios_of):
        return first, None
    return shares, wrong[0] if wrong else None


def divided(
    terms: Sequence[Sequence[Divisor | None]],
    micro: MicroBatches,
    buffer: Callable[[str, torch.device], Tensor],
    *,
    alone: bool,
) -> list[Divided]:
    """Compute the values that the terms of each micro-batch's loss are divided by.

    Of targets on a device, all are counted there first, so that the host waits for it once.

    Args:
        terms: micro-batch → the divisor of each term.
        buffer: name, device → buffer or constant, there.
        alone: whether there is no other replica; then nothing is counted if no target is ignored.
    """
    values = [
        None
        if divisors[0] is None or (alone and _counts_all(divisors[0], micro.batch))
        else _values(divisors, micro.leaves, buffer)
        for divisors in zip(*terms, strict=True)
    ]
    there = [x.double() for term in values for x in term or () if isinstance(x, Tensor)]
    read = iter(torch.stack([x.to(there[0].device) for x in there]).tolist() if there else ())
    return [
        None if term is None else [next(read) if isinstance(x, Tensor) else x for x in term]
        for term in values
    ]


def on_device(
    terms: Sequence[Sequence[Divisor | None]],
    micro: MicroBatches,
    buffer: Callable[[str, torch.device], Tensor],
) -> Tensor | None:
    """The weights of micro-batches, computed on the device of the targets, so that the host does
    not wait for it. None if a loss is not just a mean over targets that are not ignored, or if
    these are on the CPU. NaN if all targets are ignored, as the loss is then."""
    if not terms:
        return None
    counts: list[Tensor] = []
    for divisors, leaves in zip(terms, micro.leaves, strict=True):
        if len(divisors) != 1 or divisors[0] is None:
            return None
        divisor, arguments = divisors[0], [leaves[i] for i in divisors[0].leaves]
        if not divisor.counts or _place(arguments).type == "cpu":
            return None
        if not isinstance(count := _value(divisor, arguments, buffer), Tensor):
            return None
        counts.append(count)
    stacked = torch.stack(counts).double()
    return stacked / stacked.sum()


def together(parts: Sequence[Sequence[Divided]]) -> list[Divided]:
    """Join the values of the replicas' micro-batches."""
    joined: list[Divided] = []
    for term in zip(*parts, strict=True):
        values = [part for part in term if part is not None]
        if len(values) < len(term):
            joined.append(None)
        else:
            joined.append([value for part in values for value in part] if all(values) else [])
    return joined


def with_weights(
    micro: MicroBatches,
    objective: Objective,
    terms: Sequence[Divisor | None],
    parts: Sequence[tuple[Sequence[float], Sequence[Divided]]],
) -> tuple[MicroBatches, Divisor | None]:
    """Return the micro-batches of this replica, each with the weight of its loss in the loss of all
    replicas' batches, and a divisor to warn of, or None.

    Args:
        terms: the divisor of each term of a loss.
        parts: replica → the ``counts`` of its micro-batches, and what ``divided`` returns for them,
            which is empty if losses are weighted by the counts alone.
    """
    weights = objective.weights([count for counts, _ in parts for count in counts])
    values, wrong = [values for _, values in parts], None
    if values[0] and len({*map(len, values)}) == 1:
        weights, wrong = weighed(terms, together(values), weights)
    if len(parts) == 1:
        return replace(micro, weights=weights), wrong
    cut = [weights[first : first + len(micro)] for first in range(0, len(weights), len(micro))]
    return replace(micro, weights=cut[micro.replica], all_weights=cut), wrong


def _values(
    divisors: Sequence[Divisor | None],
    parts: Sequence[Sequence[Any]],
    buffer: Callable[[str, torch.device], Tensor],
) -> list[float | Tensor] | None:
    """The value that a term is divided by in each micro-batch, on a device where it is counted
    there. None if computing it fails: the run will then fail with its own error."""
    values: list[float | Tensor] = []
    try:
        for divisor, leaves in zip(divisors, parts, strict=True):
            assert divisor is not None
            if divisor.made is None:
                return []
            inputs = [leaves[i] for i in divisor.leaves]
            values.append(_value(divisor, inputs, buffer))
    except Exception:
        return None
    return values


def _value(
    divisor: Divisor, inputs: Sequence[Any], buffer: Callable[[str, torch.device], Tensor]
) -> float | Tensor:
    """The value of a divisor; a scalar on a device, for which the host does not wait, if the
    inputs that it depends on are there."""
    assert divisor.made is not None
    place = _place(inputs)
    buffers = [buffer(name, place) for name in divisor.buffers]
    value = divisor.made(*inputs, *buffers, device=place)
    return value.view(()) if isinstance(value, Tensor) and place.type != "cpu" else float(value)


def _place(arguments: Sequence[Any]) -> torch.device:
    """The device of all tensors, or else the CPU."""
    devices = {x.device for x in arguments if isinstance(x, Tensor)}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def _ratios(values: Divided, shares: Sequence[float]) -> Sequence[float]:
    """Each micro-batch's share of a term's divisors; empty if they are not known. If all divisors
    are 0, as in a batch of ignored targets, the shares of the samples."""
    if values is None:
        return shares
    total = sum(values)
    if not values or not math.isfinite(total):
        return []
    return [value / total for value in values] if total else shares


def _counts_all(divisor: Divisor, batch: Batch) -> bool:
    """Whether no target of the batch is ignored; faster than counting for each micro-batch."""
    if divisor.ignored is None or not (target := batch.leaves[divisor.leaves[0]]).is_cpu:
        return False
    return not bool((target == divisor.ignored).any())


def _near(ratios: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two lists of shares are equal up to rounding in single precision."""
    return len(ratios) == len(others) and all(
        math.isclose(a, b, rel_tol=1e-5) for a, b in zip(ratios, others, strict=True)
    )


def known_buffers(traced: Traced, model: nn.Module) -> Callable[[str, torch.device], Tensor]:
    """Return a function for ``divided``: name, device → buffer or constant, there. It raises
    InputError if the buffer has no data."""

    def buffer(name: str, device: torch.device) -> Tensor:
        tensor = traced.constants.get(name)
        if tensor is None:
            tensor = model.get_buffer(name)
        if tensor.is_meta:
            raise InputError(
                f"buffer {name!r} says how losses are weighted, which every rank has to know, "
                'and has no data here; make it with data (device="cpu") where the model is built'
            )
        return current_copy(tensor, device)

    return buffer
