"""The caller's side of one run: what instructions load from it and hand over to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe.batch import Batch, join
from fxpipe.edge import HOST
from fxpipe.program import Buffer
from fxpipe.random import mix
from fxpipe.traced import SEED, Literal, Traced, Value


class BatchHost:
    """Gives a batch's micro-batches and gradients, and collects outputs."""

    def __init__(
        self, traced: Traced, batch: Batch, microbatches: int, keep: frozenset[str], seed: int
    ) -> None:
        """Split a batch.

        Args:
            traced: the graph that runs, which names inputs and outputs.
            batch: the inputs.
            microbatches: into how many.
            keep: the outputs that the caller wants; others are dropped as they come.
            seed: of this step, where the graph draws random numbers.
        """
        self.traced = traced
        self.batch = batch
        self.whole = dict(zip(traced.inputs, batch.leaves, strict=True))
        self.sizes = batch.sizes(microbatches)
        self.inputs: dict[str, list[Any]] = {}
        columns = list(zip(*batch.split(microbatches), strict=True))
        for name, column in zip(traced.inputs, columns, strict=True):
            if name is not None:
                self.inputs[name] = list(column)
        if traced.seeded:
            self.inputs[SEED] = [torch.tensor(mix(seed, i)) for i in range(microbatches)]
        self.keep = keep
        self.outputs: dict[str, list[Any]] = {name: [None] * microbatches for name in keep}
        self.input_gradients: dict[str, dict[int, list[Tensor]]] = {}
        self.gradients: dict[str, list[Tensor]] = {}

    def give(self, buffer: Buffer) -> Any:
        """See Host.give."""
        source = self.gradients if buffer.kind == "grad" else self.inputs
        return source[buffer.value][buffer.microbatch]

    def take(self, buffer: Buffer, value: Any) -> None:
        """See Host.take."""
        if buffer.target == HOST and buffer.kind == "grad":
            by_microbatch = self.input_gradients.setdefault(buffer.value, {})
            by_microbatch.setdefault(buffer.microbatch, []).append(value)
        elif buffer.value in self.keep:
            self.outputs[buffer.value][buffer.microbatch] = value

    @property
    def shares(self) -> list[float]:
        """Each micro-batch's share of the batch: its weight in the mean."""
        return [size / self.batch.size for size in self.sizes]

    def weigh_loss(self, name: str, dtype: torch.dtype) -> None:
        """Let the gradient of each micro-batch's loss be its share of the batch."""
        self.gradients[name] = [torch.tensor(share, dtype=dtype) for share in self.shares]

    def loss(self, name: str) -> Tensor:
        """The loss of the batch, summed in micro-batch order."""
        total: Tensor | None = None
        for part, share in zip(self.outputs[name], self.shares, strict=True):
            total = part * share if total is None else total + part * share
        assert total is not None
        return total

    def output(self) -> Any:
        """The model's output for the whole batch."""
        return pytree.tree_unflatten(self.flat_output(), self.traced.out_spec)

    def flat_output(self) -> list[Any]:
        """The flat outputs, each joined."""
        return [self._joined(index, out) for index, out in enumerate(self.traced.outputs)]

    def _joined(self, index: int, out: Value | Literal) -> Any:
        if isinstance(out, Literal):
            return out.value
        if out.name in self.whole:  # an input that the model hands through
            leaf = self.whole[out.name]
            return leaf.detach() if isinstance(leaf, Tensor) else leaf
        parts = self.outputs[out.name]
        return join(parts, self.sizes, out.batched, f"output {index}")

    def set_output_gradients(
        self, names: Sequence[str], gradients: Sequence[Tensor | None]
    ) -> None:
        """Split the gradients of the joined outputs; None stands for zeros."""
        for name, gradient in zip(names, gradients, strict=True):
            parts = self.outputs[name]
            self.gradients[name] = _split_like(parts, gradient, self.shares)

    def gradients_of_inputs(self) -> Mapping[str, Tensor]:
        """The gradient of each input that gets one, for the whole batch."""
        found: dict[str, Tensor] = {}
        for name, by_microbatch in self.input_gradients.items():
            parts = []
            for i in sorted(by_microbatch):
                pieces = by_microbatch[i]
                total = pieces[0]
                for piece in pieces[1:]:
                    total = total + piece
                parts.append(total)
            whole = [part for part in parts if part.dim()]
            split = (
                all(part.shape[0] == size for part, size in zip(parts, self.sizes, strict=True))
                if len(whole) == len(parts)
                else False
            )
            found[name] = torch.cat(parts) if split else torch.stack(parts).sum(0)
        return found


def _split_like(
    parts: Sequence[Tensor], gradient: Tensor | None, shares: Sequence[float]
) -> list[Tensor]:
    if gradient is None:
        return [torch.zeros_like(part) for part in parts]
    if gradient.dim() == 0:
        return [gradient * share for share in shares]  # the output was averaged
    if sum(part.shape[0] for part in parts) == gradient.shape[0]:
        return list(gradient.split([part.shape[0] for part in parts]))
    return [gradient, *(torch.zeros_like(gradient) for _ in parts[1:])]  # the first was taken


def draw_seed(traced: Traced) -> int:
    """A new seed from torch's generator, if the graph draws random numbers at all."""
    return int(torch.randint(2**62, (), dtype=torch.int64).item()) if traced.seeded else 0


def next_seed(traced: Traced) -> int:
    """What ``draw_seed`` gives next; a run draws it when it succeeds, and so not in vain."""
    before = torch.get_rng_state()
    try:
        return draw_seed(traced)
    finally:
        torch.set_rng_state(before)
