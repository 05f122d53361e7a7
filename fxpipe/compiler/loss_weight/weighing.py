"""Weigh the losses of micro-batches by what they are means over, such as targets that count."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.compiler.compiled import Compiled
from fxpipe.compiler.loss_weight.comparing import Sample, advice, difference_of
from fxpipe.compiler.loss_weight.terms import Divisor, current_copy
from fxpipe.compiler.objective import Objective, Weighed, with_weights
from fxpipe.compiler.options import Options
from fxpipe.errors import InputError
from fxpipe.ir.traced import Traced
from fxpipe.kernels.kernel import BackwardResult, Kernel, PartialResult, Totals, Wrapping
from fxpipe.runtime.batch import Batch, MicroBatches
from fxpipe.runtime.host import BatchHost, Watch
from fxpipe.torchtools.source import users_level

_CPU = torch.device("cpu")

_WEIGHTS = "the weights"  # what replicas tell each other

_MOST = 1 << 24
"""The most bytes of outputs that are kept for a comparison of losses."""


class Weighing:
    """Weighs losses by the divisors of their terms, where these are known; else by samples.

    The first step of each kind is compared with the loss of the joined outputs; where these differ,
    there is one warning. If the model returns its loss, or outputs are large, that is not possible,
    and there is a warning where the graph of the loss tells of another divisor.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._told: set[str] = set()  # what was warned of

    def weighed(self, compiled: Compiled, micro: MicroBatches) -> Weighed:
        """The same call, with the weights of its micro-batches' losses. In a step, those of weight
        0 add no gradients.

        In a step the batch is that of all replicas, and in a call, which has a loss only if the
        model returns one, that of this replica. Raises InputError as ``Objective.counts`` and
        ``Objective.weights``.
        """
        averages = self.options.objective.averages and self.replicas(compiled) == 1
        joins = not averages or self._counts_others(compiled, len(micro))
        if joins:
            micro = self.joined(compiled, micro)
        weights = micro.weights
        if compiled.purpose == "step" and not isinstance(weights, Tensor) and not all(weights):
            compiled = discarding(compiled, weights)
        watch = self._watch(compiled, micro)
        if watch is None and not joins:
            compiled.done.add("weighed")  # its samples alone count
        return Weighed(compiled, micro, watch)

    def _watch(self, compiled: Compiled, micro: MicroBatches) -> Watch | None:
        """What compares the losses of a first step with that of the joined outputs."""
        if "compared" in compiled.done or (count := self._compares(compiled, micro)) < 2:
            return None
        compiled.done.add("compared")

        def look(host: BatchHost) -> None:
            self._compare(host, count)

        return Watch(compiled.results, count, look)

    def _compares(self, compiled: Compiled, micro: MicroBatches) -> int:
        """How many micro-batches of a step can be compared with their joined outputs."""
        if compiled.purpose != "step" or self.options.loss is None:
            return 0
        total = 0
        for index, specs in enumerate(compiled.specs):
            total += sum(specs[name].bytes for name in compiled.results if name in specs)
            if total > _MOST:
                return index
        return len(micro)

    def _compare(self, host: BatchHost, count: int) -> None:
        """Compare the losses of so many micro-batches, and warn where they differ."""
        objective, options = self.options.objective, self.options
        weights = [float(weight) for weight in host.micro.weights[:count]]
        if objective.reduction == "mean":
            if not (total := sum(weights)) > 0:
                return
            weights = [weight / total for weight in weights]
        device = options.here if options.places else _CPU
        found = difference_of(lambda: Sample.of(host, objective, count, device), objective, weights)
        if found is not None and found.kind not in self._told:
            self._told.add(found.kind)
            some = "" if count == len(host.micro) else f" of the first {count} micro-batches"
            warnings.warn(advice(found, objective, some), stacklevel=users_level())

    def _counts_others(self, compiled: Compiled, microbatches: int) -> bool:
        """Whether the loss may be a mean over others than samples, so that its value for so many
        micro-batches is not that of the batch."""
        terms, replicas = compiled.terms, self.replicas(compiled)
        counted = microbatches * replicas > 1 and any(map(any, terms))
        known = "graph" in self._told or "suspected" in compiled.done
        if known and replicas == 1:  # only means over targets change the weights
            counted = counted and all(term is not None and term.mean for term in terms[0])
        return counted

    def joined(self, compiled: Compiled, micro: MicroBatches) -> MicroBatches:
        """The micro-batches, where they are not just weighted by their samples."""
        objective, group = self.options.objective, self.options.group
        if self.replicas(compiled) > 1:
            by_rank = group.gather(_WEIGHTS, lambda: self._own(compiled, micro))
            parts = [by_rank[rank] for rank in group.twins]
        elif self._counts_others(compiled, len(micro)):
            found = self._divided(compiled, micro)
            if (there := on_device(compiled.terms, found)) is not None:
                return replace(micro, weights=there)
            parts = [(objective.counts(micro), as_numbers(found))]
        else:
            return with_weights(micro, objective.weights(objective.counts(micro)))
        weights = objective.weights([count for counts, _ in parts for count in counts])
        every, wrong = [values for _, values in parts], None
        if every[0] and len({*map(len, every)}) == 1:
            weights, wrong = weighed(next(iter(compiled.terms), ()), joined_terms(every), weights)
        if wrong is not None:
            self._suspect(compiled, micro, wrong)
        return with_weights(micro, weights)

    def replicas(self, compiled: Compiled) -> int:
        """How many replicas share the batch of a call."""
        return self.options.group.replicas if compiled.purpose == "step" else 1

    def told(self, compiled: Compiled, micro: MicroBatches) -> Mapping[str, Any]:
        """What other replicas need to weigh the losses of a call, by what ``weighed`` asks for."""
        return {_WEIGHTS: self._own(compiled, micro)} if self.replicas(compiled) > 1 else {}

    def _own(self, compiled: Compiled, micro: MicroBatches) -> tuple[Sequence[float], Any]:
        """The samples of each micro-batch, and what its loss is divided by if that may matter."""
        counted = self._counts_others(compiled, len(micro))
        values = as_numbers(self._divided(compiled, micro)) if counted else []
        return self.options.objective.counts(micro), values

    def _divided(self, compiled: Compiled, micro: MicroBatches) -> list[Found]:
        """What the terms of each micro-batch's loss are divided by."""
        buffers = known_buffers(compiled.traced, self.options.model)
        return divided(compiled.terms, micro, buffers, alone=self.replicas(compiled) == 1)

    def _suspect(self, compiled: Compiled, micro: MicroBatches, wrong: Divisor) -> None:
        """Take note that the graph of a loss tells of a divisor that samples are no measure of:
        compare the losses of this step, too, or warn where they cannot be."""
        if self._compares(compiled, micro) > 1:
            if "suspected" not in compiled.done:
                compiled.done.add("suspected")
                compiled.done.discard("compared")
        elif "graph" not in self._told:
            self._told.add("graph")
            warnings.warn(_of_graph(self.options.objective, wrong), stacklevel=users_level())


def discarding(compiled: Compiled, weights: Sequence[float]) -> Compiled:
    """The same call, with kernels that discard the gradients of micro-batches of weight 0."""
    zeros = compiled.program.replicas > 1
    kernels = [
        kernels if weight else [Discarding(kernel, zeros=zeros) for kernel in kernels]
        for kernels, weight in zip(compiled.kernels, weights, strict=True)
    ]
    return replace(compiled, kernels=kernels)


class Discarding(Wrapping):
    """Runs a micro-batch of weight 0, and adds no gradients of parameters.

    These gradients are 0, but computing them may give NaN: if the loss divides by the number of
    targets that are not ignored, a gradient is 0 times infinity.

    Attributes:
        zeros: whether sums that no other micro-batch has begun are 0 instead of None, as replicas
            add up gradients of the same parameters.
    """

    def __init__(self, kernel: Kernel, *, zeros: bool = False) -> None:
        super().__init__(kernel)
        self.zeros = zeros

    def backward(
        self, saved: list[Any], gradients: list[Tensor], totals: Totals = ()
    ) -> BackwardResult:
        """See Kernel.backward. The gradients of the inputs may be NaN."""
        result = self.kernel.backward(saved, gradients)
        return BackwardResult(result.inputs, self._sums(totals, result.parameters))

    def weight_grad(self, deferred: list[Any], totals: Totals = ()) -> list[Tensor | None]:
        return self._sums(totals, self.kernel.weight_grad(deferred))

    def partial_backward(
        self, kind: str, bucket: int, left: list[Any], totals: Totals = ()
    ) -> PartialResult:
        result = self.kernel.partial_backward(kind, bucket, left)
        return PartialResult(result.left, self._sums(totals, result.parameters))

    def _sums(self, totals: Totals, made: Sequence[Tensor | None]) -> list[Tensor | None]:
        sums = list(totals) or [None] * len(made)
        if not self.zeros:
            return sums
        return [
            torch.zeros_like(x) if total is None and x is not None else total
            for total, x in zip(sums, made, strict=True)
        ]


def _of_graph(objective: Objective, wrong: Divisor) -> str:
    """The warning that the losses of micro-batches, which are divided by ``wrong``, may not average
    to the loss of the batch."""
    where = f"the loss ({wrong.line})" if wrong.line else "the loss"
    if wrong.sums:
        return (
            f'{where} is a sum over targets, and reduction="mean" averages it over '
            'micro-batches; give fxpipe.compile(..., reduction="sum"), which adds it up'
        )
    of = "the model's inputs" if objective.loss is None else "the targets"
    return (
        f"{where} is a mean over targets of which some are ignored, masked or weighted. The "
        "losses of micro-batches are averaged by their samples, which are not in proportion to "
        "these targets: the loss is not that of the whole batch, nor are its gradients. Give "
        "fxpipe.compile(..., extensions=[fxpipe.LossWeight(function)]) a function of "
        f"{of} that returns what the loss of a micro-batch is divided by. See docs/training.md"
    )


Divided = Sequence[float] | None
"""Micro-batch → the value that a term of its loss is divided by; empty if that is not known. None
if these values are in proportion to the samples."""

Found = Sequence[float | Tensor] | None
"""The same, but values that are counted on a device are scalars there."""


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
            wrong.append(divisor)
    means = all(divisor is not None and divisor.mean for divisor in terms)
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
) -> list[Found]:
    """Compute the values that the terms of each micro-batch's loss are divided by.

    Args:
        terms: micro-batch → the divisor of each term.
        buffer: name, device → buffer or constant, there.
        alone: whether there is no other replica; then nothing is counted if no target is ignored.
    """
    return [
        None
        if divisors[0] is None or (alone and _counts_all(divisors[0], micro.batch))
        else _values(divisors, micro.leaves, buffer)
        for divisors in zip(*terms, strict=True)
    ]


def on_device(terms: Sequence[Sequence[Divisor | None]], found: Sequence[Found]) -> Tensor | None:
    """The weights of micro-batches on the device of the targets, so that the host does not wait for
    it. None if a loss is not just a mean over targets that are not ignored, or if these are on the
    CPU. NaN if all targets are ignored, as the loss is then."""
    counts = [x for term in found for x in term or () if isinstance(x, Tensor)]
    means = all(len(each) == 1 and each[0] is not None and each[0].counts for each in terms)
    if not means or len(counts) != len(terms):
        return None
    stacked = torch.stack(counts).double()
    return stacked / stacked.sum()


def as_numbers(found: Sequence[Found]) -> list[Divided]:
    """What was found, as numbers. The host waits for a device once."""
    there = [x.double() for term in found for x in term or () if isinstance(x, Tensor)]
    numbers = iter(torch.stack([x.to(there[0].device) for x in there]).tolist() if there else ())
    return [
        None if term is None else [next(numbers) if isinstance(x, Tensor) else x for x in term]
        for term in found
    ]


def joined_terms(parts: Sequence[Sequence[Divided]]) -> list[Divided]:
    """Join the values of the replicas' micro-batches."""
    joined: list[Divided] = []
    for term in zip(*parts, strict=True):
        values = [part for part in term if part is not None]
        if len(values) < len(term):
            joined.append(None)
        else:
            joined.append([value for part in values for value in part] if all(values) else [])
    return joined


def _values(
    divisors: Sequence[Divisor | None],
    parts: Sequence[Sequence[Any]],
    buffer: Callable[[str, torch.device], Tensor],
) -> list[float | Tensor] | None:
    """The value that a term is divided by in each micro-batch: a scalar on a device, for which the
    host does not wait, if the inputs that it depends on are there. None if computing it fails: the
    run will then fail with its own error."""
    values: list[float | Tensor] = []
    try:
        for divisor, leaves in zip(divisors, parts, strict=True):
            assert divisor is not None
            if divisor.made is None:
                return []
            inputs = [leaves[i] for i in divisor.leaves]
            place = _place(inputs)
            buffers = [buffer(name, place) for name in divisor.buffers]
            value = divisor.made(*inputs, *buffers, device=place)
            if isinstance(value, Tensor) and place.type != "cpu":
                values.append(value.view(()))
            else:
                values.append(float(value))
    except Exception:
        return None
    return values


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
