"""The caller's side of a run: the values that Load instructions read and Output instructions hand
over, and everything else that a run needs for one batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain
from operator import add
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.ir.plan import ValueSpec
from fxpipe.ir.traced import SEED, Literal, Traced, Value
from fxpipe.ir.value import Buffer
from fxpipe.kernels.kernel import Kernel
from fxpipe.random import mix
from fxpipe.runtime.batch import MicroBatches
from fxpipe.torchtools.pytrees import together

_DRAWING = threading.RLock()
"""Held while drawing from torch's generator, which all pipes share, or while reading its state."""


@dataclass(frozen=True)
class Watch:
    """Looks at the outputs of a step's first micro-batches, which the caller did not ask for.

    Attributes:
        names: the outputs.
        microbatches: of how many micro-batches they are kept until the end of the step.
        look: called with the host when the step has succeeded. It raises nothing.
    """

    names: frozenset[str]
    microbatches: int
    look: Callable[[BatchHost], None]


@dataclass(frozen=True)
class Logged:
    """What a loss returns beside it, such as an accuracy, weighted as the losses are.

    Attributes:
        parts: name → the number of each micro-batch.
        weights: micro-batch → its weight; over replicas, in the batch of this one.
    """

    parts: Mapping[str, Sequence[Any]]
    weights: Sequence[float] | Tensor

    def read(self) -> dict[str, float]:
        """The numbers of the batch. Waits for devices."""
        totals = {name: weighted_sum(parts, self.weights) for name, parts in self.parts.items()}
        return {name: float(total) for name, total in totals.items()}


class BatchHost:
    """Gives a run the micro-batches and gradients of a batch, and collects the outputs."""

    def __init__(
        self,
        traced: Traced,
        micro: MicroBatches,
        keep: frozenset[str],
        seed: int,
        place: torch.device | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Find the inputs of each micro-batch by name.

        Args:
            traced: the graph that runs, which names inputs and outputs.
            micro: the inputs.
            keep: the outputs that the caller wants; others are dropped at once.
            seed: the seed of this step, if the graph draws random numbers.
            place: the device to which values from other ranks are moved; by default they stay in
                host memory.
            watch: what looks at further outputs.
        """
        microbatches = len(micro)
        self.traced = traced
        self.micro = micro
        self.inputs: dict[str, Sequence[Any]] = {}
        for name, column in zip(traced.inputs, zip(*micro.leaves, strict=True), strict=True):
            if name is not None:
                self.inputs[name] = column
        if traced.seeded:
            before = micro.replica * microbatches  # micro-batches of the replicas before this one
            self.inputs[SEED] = [torch.tensor(mix(seed, before + i)) for i in range(microbatches)]
        self._place = place
        kept = dict.fromkeys(watch.names, watch.microbatches) if watch is not None else {}
        kept |= dict.fromkeys(keep, microbatches)
        self.outputs: dict[str, list[Any]] = {name: [None] * kept[name] for name in kept}
        self._elsewhere: dict[int | None, list[Any]] = {  # other replica → its losses
            replica: [None] * microbatches
            for replica in range(len(micro.all_weights))
            if replica != micro.replica
        }
        self.input_gradients: dict[str, dict[int, dict[int, Tensor]]] = {}
        self.gradients: dict[str, Sequence[Tensor]] = {}
        self._complete: Callable[[], None] | None = None
        self._missing = sum(kept.values()) + microbatches * len(self._elsewhere)
        self._lock = threading.Lock()

    @cached_property
    def whole(self) -> dict[str, Any]:
        """The inputs that the model returns unchanged, by name."""
        returned = {out.name for out in self.traced.outputs if isinstance(out, Value)}
        leaves = zip(self.traced.inputs, self.micro.batch.leaves, strict=True)
        return {name: leaf for name, leaf in leaves if name in returned}

    def when_complete(self, complete: Callable[[], None]) -> None:
        """Have a function called as soon as all outputs have come."""
        self._complete = complete

    def give(self, buffer: Buffer) -> Any:
        """The value that a Load asks for."""
        source = self.gradients if buffer.kind == "grad" else self.inputs
        return source[buffer.value][buffer.microbatch]

    @property
    def sources(self) -> set[torch.device]:
        """The devices other than the host that Loads read from."""
        given = chain(self.micro.batch.leaves, *self.gradients.values())
        tensors = (value for value in given if isinstance(value, Tensor))
        return {tensor.device for tensor in tensors if not tensor.is_cpu}

    @property
    def shared(self) -> str | None:
        """The output that replicas send each other: the loss of a step, if there are several."""
        return self.traced.loss if self._elsewhere else None

    def take(self, buffer: Buffer, value: Any, replica: int | None = None) -> bool:
        """Take the value that an Output hands over, in this replica or in another one. Returns
        whether it is kept."""
        if buffer.kind == "grad":
            by_microbatch = self.input_gradients.setdefault(buffer.value, {})
            by_microbatch.setdefault(buffer.microbatch, {})[buffer.source] = value
            return True
        parts = self._elsewhere.get(replica) or self.outputs.get(buffer.value, [])
        if buffer.microbatch >= len(parts):
            return False
        parts[buffer.microbatch] = in_own_storage(value)
        if self._complete is not None:
            with self._lock:
                self._missing -= 1
                complete = self._missing == 0
            if complete:
                self._complete()
        return True

    def weigh_loss(self, dtype: torch.dtype, scale: float = 1.0) -> None:
        """Set the gradient of each micro-batch's loss to its weight in the loss of the batch, times
        ``scale``. The reported loss is not scaled. ``dtype`` is that of the losses."""
        assert self.traced.loss is not None
        weights = self.micro.weights
        if not isinstance(weights, Tensor):
            weights = torch.tensor(weights, dtype=torch.float64)
        self.gradients[self.traced.loss] = (weights * scale).to(dtype).unbind()

    def loss(self) -> Tensor:
        """The loss of the batch, summed over micro-batches in order, then over replicas."""
        assert self.traced.loss is not None
        here = self._parts(self.traced.loss)
        if not self._elsewhere:
            return weighted_sum(here, self.micro.weights)
        losses = [
            weighted_sum(self._elsewhere.get(replica, here), weights)
            for replica, weights in enumerate(self.micro.all_weights)
            if any(weights)
        ]
        return reduce(add, losses)

    def logged(self) -> Logged:
        """The numbers that the loss returns beside it, which may not be computed yet."""
        parts = {name: self.outputs[value] for name, value in self.traced.logged.items()}
        weights, every = self.micro.weights, self.micro.all_weights
        if every and any(own := every[self.micro.replica]):
            share = sum(own) / sum(map(sum, every))
            weights = [weight / share for weight in own]
        return Logged(parts, weights)

    def output(self) -> Any:
        """The model's output for the whole batch."""
        return together(self.flat_output(), self.traced.out_spec)

    def called(self) -> list[Any]:
        """The flat outputs of a call that has succeeded, which draws its seed."""
        outputs = self.flat_output()
        if self.traced.seeded:
            draw_seed()
        return outputs

    def flat_output(self) -> list[Any]:
        """The flat outputs, each joined over the micro-batches."""
        return [self._joined(index, out) for index, out in enumerate(self.traced.outputs)]

    def _joined(self, index: int, out: Value | Literal) -> Any:
        if isinstance(out, Literal):
            return self.micro.batch.size if out.dims else out.value
        if out.name in self.whole:
            leaf = self.whole[out.name]
            return leaf.detach() if isinstance(leaf, Tensor) else leaf
        if out.name == self.traced.loss:
            return self.loss()
        return join(self._parts(out.name), self.micro.sizes, out.dims, f"output {index}")

    def _parts(self, name: str) -> list[Any]:
        """An output of each micro-batch."""
        parts = self.outputs[name]
        return parts if self._place is None else [self.here(part) for part in parts]

    def here(self, value: Any) -> Any:
        """A value on the caller's device."""
        moves = self._place is not None and isinstance(value, Tensor)
        return value.to(self._place) if moves else value


@dataclass(frozen=True)
class Job:
    """What a run needs for one batch.

    Attributes:
        kernels: micro-batch → stage → the kernel that runs it.
        host: the caller's side.
        clipping: clips the batch's gradients, if the program clips.
        specs: micro-batch → name of a value → its spec.
    """

    kernels: Sequence[Sequence[Kernel]]
    host: BatchHost
    clipping: Any = None
    specs: Sequence[Mapping[str, ValueSpec]] = ()


def in_own_storage(value: Any) -> Any:
    """Clone a scalar that lies in a large storage. That of ``mse_loss``, say, is as large as the
    output and would stay allocated until all micro-batches are finished."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.untyped_storage().nbytes() > 64:
        return value.clone()
    return value


def draw_seed() -> int:
    """Draw a seed from torch's generator."""
    with _DRAWING:
        return int(torch.randint(2**62, (), device="cpu").item())


def next_seed() -> int:
    """The next result of ``draw_seed``, without drawing: a run draws only when it succeeds."""
    with _DRAWING:
        before = torch.get_rng_state()
        try:
            return draw_seed()
        finally:
            torch.set_rng_state(before)


def join(
    parts: Sequence[Any], sizes: Sequence[int], dims: tuple[int, ...] | None, name: str
) -> Any:
    """Join the parts of an output from all micro-batches.

    Tensors are concatenated along the batch dimension. Floating-point scalar tensors are averaged
    by samples. Python numbers that count samples are added. Anything else must be the same in every
    micro-batch.

    Args:
        parts: the output of each micro-batch.
        sizes: the number of samples in each.
        dims: the batch dimensions; None if the sizes tell whether dimension 0 is one.
        name: the output's name in the error.

    Raises:
        InputError: the parts differ and cannot be joined.
    """
    first = parts[0]
    if not isinstance(first, Tensor):
        if dims:
            return sum(parts)
        if all(part == first for part in parts):
            return first
    elif first.dim() == 0 and (first.is_floating_point() or first.is_complex()):
        return weighted_sum(parts, [size / sum(sizes) for size in sizes])
    elif dims is not None and len(dims) > 1 and len(parts) > 1:
        raise InputError(
            f"{name} has the batch in dimensions {' and '.join(map(str, dims))}, and a micro-batch "
            "knows its own samples alone; compute it from the joined outputs"
        )
    else:
        dim = 0 if dims is None else next(iter(dims), None)
        if dim is not None and first.dim() > dim:
            if all(part.shape[dim] == size for part, size in zip(parts, sizes, strict=True)):
                return torch.cat(list(parts), dim)
        if all(torch.equal(part, first) for part in parts):
            return first.clone()
    raise InputError(
        f"{name} differs between micro-batches and has no batch dimension to join it along; "
        "return it per sample, or only the mean as a scalar"
    )


def times(part: Tensor, weight: float | Tensor) -> Tensor:
    """A part times its weight. A weight on a device rounds as a number does, and if it is 0, so is
    the product, even of NaN."""
    if not isinstance(weight, Tensor):
        return part * weight
    kind = torch.promote_types(part.dtype, torch.float32)
    weight = weight.to(part.device, kind)
    return torch.where(weight == 0, 0, part.to(kind) * weight).to(part.dtype)


def weighted_sum(parts: Sequence[Tensor], weights: Sequence[float] | Tensor) -> Tensor:
    """The sum of parts times weights, in order. Parts of weight 0 are left out, even NaN."""
    total: Tensor | None = None
    for part, weight in zip(parts, weights, strict=True):
        if isinstance(weight, Tensor) or weight:
            weighted = times(part, weight)  # even by 1: a device may soon reuse the part's memory
            total = weighted if total is None else total + weighted
    assert total is not None, "some weight is not zero"
    return total
