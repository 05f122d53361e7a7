"""Compare the losses of micro-batches with the loss of their joined outputs, once.

The loss is called on outputs that a step has computed, so that the model runs no more often. Where
the weighted losses of micro-batches do not make the loss of the batch, gradients tell why:

a sum:            each sample has the gradient in the batch that it has in its micro-batch
another divisor:  the gradient of a micro-batch differs by one factor, whatever the outputs are
else:             no weights make it right: samples, or terms, are not divided by one number
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.compiler.objective import Objective
from fxpipe.ir.traced import Literal as Constant
from fxpipe.ir.traced import Value
from fxpipe.runtime.batch import MicroBatches
from fxpipe.runtime.host import BatchHost, join
from fxpipe.torchtools.pytrees import together
from fxpipe.torchtools.state import to_device, under, untouched

Kind = Literal["sum", "samples", "divisor", "coupled"]

_NEAR = 1e-3
"""How much factors of gradients may differ, as a part of the largest gradient."""


class Difference(NamedTuple):
    """The loss of a batch, and what the losses of its micro-batches make of it, which is another
    number.

    Attributes:
        made: the weighted sum of the losses of the micro-batches.
        whole: the loss of their joined outputs.
        kind: why they differ; "samples" for a mean over samples that is not averaged by samples.
    """

    made: float
    whole: float
    kind: Kind


@dataclass(frozen=True)
class Sample:
    """The outputs and targets of some first micro-batches of a step.

    Attributes:
        objective: the loss.
        micro: the batch.
        outputs: micro-batch → the flat outputs of the model.
        dims: the batch dimensions of each flat output, as in ``join``.
        spec: how the outputs nest.
        device: where the loss is computed.
    """

    objective: Objective
    micro: MicroBatches
    outputs: Sequence[Sequence[Any]]
    dims: Sequence[tuple[int, ...] | None]
    spec: pytree.TreeSpec
    device: torch.device

    @staticmethod
    def of(host: BatchHost, objective: Objective, count: int, device: torch.device) -> Sample:
        """The outputs of ``count`` micro-batches that a host has, in single precision or more.
        Raises LookupError if it is not known along which dimension they are joined."""
        handed = dict(zip(host.traced.inputs, zip(*host.micro.leaves, strict=True), strict=True))

        def part(out: Value | Constant, index: int) -> Any:
            if isinstance(out, Constant):
                return host.micro.sizes[index] if out.dims else out.value
            value = handed[out.name][index] if out.name in handed else host.outputs[out.name][index]
            return _precise(value)

        outs = host.traced.outputs
        outputs = [to_device([part(o, i) for o in outs], device) for i in range(count)]
        first = set(filter(None, host.micro.batch.dims)) == set()
        dims = [
            _dims(value, host.micro.sizes[0], first) if out.dims is None else out.dims
            for out, value in zip(outs, outputs[0], strict=True)
        ]
        return Sample(objective, host.micro, outputs, dims, host.traced.out_spec, device)

    @property
    def sizes(self) -> list[int]:
        """The samples of each micro-batch."""
        return self.micro.sizes[: len(self.outputs)]

    def losses(self, outputs: Sequence[Sequence[Any]]) -> list[Tensor]:
        """The loss of each micro-batch, for these outputs."""
        return [
            self._loss(flat, self.micro.leaves[index][self.micro.batch.inputs :])
            for index, flat in enumerate(outputs)
        ]

    def whole(self, outputs: Sequence[Sequence[Any]]) -> Tensor:
        """The loss of these outputs joined. Raises InputError if they cannot be."""
        batch, samples = self.micro.batch, sum(self.sizes)
        leaves = zip(batch.leaves[batch.inputs :], batch.dims[batch.inputs :], strict=True)
        targets = [x if dim is None else x.narrow(dim, 0, samples) for x, dim in leaves]
        return self._loss(self.joined(outputs), targets)

    def joined(self, outputs: Sequence[Sequence[Any]]) -> list[Any]:
        """The flat outputs of all these micro-batches together."""
        columns = zip(zip(*outputs, strict=True), self.dims, strict=True)
        return [join(column, self.sizes, dims, "an output") for column, dims in columns]

    def mixed(self) -> list[list[Any]]:
        """Other outputs of the same kind: each sample's is a mean of two samples'."""
        mixed: list[list[Any]] = [[] for _ in self.outputs]
        columns = zip(*self.outputs, strict=True)
        for column, whole in zip(columns, self.joined(self.outputs), strict=True):
            split = [_split_dim(part, whole, n) for part, n in zip(column, self.sizes, strict=True)]
            floats = isinstance(whole, Tensor) and whole.is_floating_point()
            if floats and None not in split:
                dim: Any = split[0]
                column = ((whole + whole.roll(1, dim)) / 2).split(self.sizes, dim)
            for parts, part in zip(mixed, column, strict=True):
                parts.append(part)
        return mixed

    def _loss(self, output: Sequence[Any], targets: Sequence[Any]) -> Tensor:
        given = to_device([*map(_precise, targets)], self.device)
        leaves = [*self.micro.batch.leaves[: self.micro.batch.inputs], *given]
        _, _, targets = self.micro.batch.unflatten(leaves)
        loss: Tensor = self.objective(together(output, self.spec), *targets)
        return loss


def advice(difference: Difference, objective: Objective, samples: str) -> str:
    """The warning of a difference, with what can be done. ``samples`` says of which batch."""
    summed, weighed = objective.reduction == "sum", not objective.averages
    if summed:
        how, leave = "added up", 'leave out reduction="sum"'
    elif weighed:
        how, leave = "weighted by the LossWeight", "leave out the LossWeight"
    else:
        how, leave = "averaged by samples, or by the targets that count", ""
    match difference.kind:
        case "sum":
            first = f"{leave}, and " if leave else ""
            why, cure = "it is a sum over samples", f'{first}give compile(..., reduction="sum")'
        case "samples":
            why, cure = "it is a mean over samples", leave
        case "divisor":
            why = "it is divided by something else, such as how many entries a mask selects"
            cure = (
                "give compile(..., extensions=[fxpipe.LossWeight(function)]) a function of the "
                "targets that returns what a micro-batch has of that"
            )
            if summed:
                cure = f"{leave}, and {cure}"
            elif weighed:
                cure = "let the function of LossWeight return what a micro-batch has of that"
        case "coupled":
            why = (
                "no weights of micro-batches make it right, as its samples depend on each other "
                "(pairs, statistics or a ratio over the batch), or its terms are divided by "
                "different things"
            )
            cure = (
                "accept the loss of each micro-batch, or compute that of the batch without step: "
                "loss(pipe(inputs), target).backward()"
            )
    return (
        f"the losses of micro-batches, {how}, make {difference.made:.6g}{samples}, and the loss of "
        f"their joined outputs is {difference.whole:.6g}: {why}; {cure}. See docs/training.md"
    )


def difference_of(
    take: Callable[[], Sample], objective: Objective, weights: Sequence[float]
) -> Difference | None:
    """Compare the weighted losses of micro-batches with the loss of their joined outputs.

    Args:
        take: returns the micro-batches.
        objective: their loss.
        weights: the weight of each one's loss in the loss of all of them.

    Returns:
        How they differ; None if they do not, or if that cannot be told: the loss raises, draws
        random numbers or keeps state, or is not finite.
    """
    loss = objective.loss
    with untouched(loss if isinstance(loss, nn.Module) else nn.Module()), under(()):
        try:
            sample = take()
            with torch.no_grad():
                losses, loss_of_all = sample.losses(sample.outputs), sample.whole(sample.outputs)
                whole = float(loss_of_all)
                weighted = [w * float(x) for w, x in zip(weights, losses, strict=True) if w]
                made, scale = sum(weighted), max(map(abs, (whole, *weighted)))
                allowed = _rounding([loss_of_all, *sample.outputs[0]]) * scale
                if not math.isfinite(whole) or abs(made - whole) <= allowed:
                    return None
                if float(sample.whole(sample.outputs)) != whole:
                    return None
            with torch.enable_grad():
                kind = _kind(sample)
        except Exception:
            return None
    return Difference(made, whole, kind)


def _kind(sample: Sample) -> Kind:
    """Why no weighted sum of micro-batches' losses, or another one, is the loss of the batch."""
    here, elsewhere = _factors(sample, sample.outputs), _factors(sample, sample.mixed())
    if here is None or elsewhere is None or not all(map(_alike, here, elsewhere)):
        return "coupled"
    if all(_alike(factor, 1.0) for factor in here):
        return "sum"
    shares = [size / sum(sample.sizes) for size in sample.sizes]
    return "samples" if all(map(_alike, here, shares)) else "divisor"


def _factors(sample: Sample, outputs: Sequence[Sequence[Any]]) -> list[float | None] | None:
    """For each micro-batch the factor between the gradients of its outputs in the loss of all and
    in its own loss; None where both are 0, or its own is not finite. None if some gradients differ
    by no factor."""
    flat = [
        [x.detach().requires_grad_() if _is_float(x) else x for x in output] for output in outputs
    ]
    sources = [[x for x in output if _is_float(x)] for output in flat]
    joined = _gradient(sample.whole(flat), [x for each in sources for x in each])
    counts = [sum(x.numel() for x in each) for each in sources]
    in_batch = joined.split(counts)
    largest = joined.abs().max()
    factors: list[float | None] = []
    for loss, each, there in zip(sample.losses(flat), sources, in_batch, strict=True):
        own = _gradient(loss, each)
        square = own.dot(own)
        known = bool(square.isfinite()) and bool(square > 0)
        factor = own.dot(there) / square if known else own.new_zeros(())
        rest = there - factor * own if known else there
        if not bool((rest.abs() <= _NEAR * largest).all()):
            return None
        factors.append(float(factor) if known else None)
    return factors


def _gradient(loss: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """The gradients of a loss, in one row."""
    found = torch.autograd.grad(loss, sources, allow_unused=True)
    filled = (torch.zeros_like(x) if g is None else g for x, g in zip(sources, found, strict=True))
    return torch.cat([gradient.double().flatten() for gradient in filled])


def _alike(first: float | None, second: float | None) -> bool:
    return (
        first is None
        or second is None
        or abs(first - second) <= _NEAR * max(abs(first), abs(second))
    )


def _rounding(values: Sequence[Any]) -> float:
    """How much a loss that is computed from and as these values may round, as a part of it."""
    return max(math.sqrt(torch.finfo(x.dtype).eps) for x in values if _is_float(x)) / 32


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _dims(value: Any, size: int, first: bool) -> tuple[int, ...]:
    """The batch dimension of an output of a micro-batch of this size, if it has one; ``first`` if
    that of all inputs is the first. Raises LookupError if several dimensions are as large."""
    found = [dim for dim, n in enumerate(getattr(value, "shape", ())) if n == size]
    if len(found) > 1 and not (first and found[0] == 0):
        raise LookupError(f"the batch may be in any of the dimensions {found}")
    return tuple(found[:1])


def _precise(value: Any) -> Any:
    """The value with single precision at least."""
    half = _is_float(value) and value.dtype.itemsize < torch.float32.itemsize
    return value.float() if half else value


def _split_dim(part: Any, whole: Any, size: int) -> int | None:
    """The dimension along which a part of an output was joined; None if it was not."""
    if not isinstance(part, Tensor) or part.shape == whole.shape:
        return None
    dims = [d for d, n in enumerate(part.shape) if n == size and n != whole.shape[d]]
    return next(iter(dims), None)
