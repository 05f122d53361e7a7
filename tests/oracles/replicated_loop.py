"""Plain training loops, without fxpipe, over the batches of several replicas in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracles import loop
from tests.oracles.delayed_loop import DelayedLoop


def train(
    model: nn.Module,
    microbatches: int,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    loss: Callable[..., Tensor],
    weight: Callable[..., Any] | None = None,
    total: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """Run forward and backward of the batches of all replicas.

    The first replica adds its gradients to ``.grad``, each other one sums its own. These sums, and
    the losses, are then added in the order of the replicas. Each replica begins with the same
    buffers, and those of the first one are kept.

    Args:
        model: the model.
        microbatches: how many micro-batches each batch is split into.
        inputs: replica → its batch.
        targets: replica → its targets.
        loss: ``loss(output, target)``, a mean.
        weight: targets of a micro-batch → the weight of its loss, by default its samples.
        total: whether losses are added, not averaged.
        scale: factor of the losses for the gradients.

    Returns:
        The loss of all batches together.
    """
    parts = [loop.split((x, y), len(x), microbatches) for x, y in zip(inputs, targets, strict=True)]
    counts = [[float(len(y) if weight is None else weight(y)) for _, y in own] for own in parts]
    every = 1.0 if total else sum(map(sum, counts))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    after: dict[str, Tensor] = {}
    losses: list[Tensor] = []
    sums: list[dict[str, Tensor | None]] = []
    for own, weights in zip(parts, counts, strict=True):
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        found: Tensor | None = None
        for (x, y), count in zip(own, weights, strict=True):
            made = loss(model(x), y)
            if count:
                (made * (count / every * scale)).backward()
                part = made.detach() * (count / every)
                found = part if found is None else found + part
        if found is not None:
            losses.append(found)
        sums.append(loop.gradients(model))
        loop.clear(model)
        after = after or {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(after[name])
    for name, parameter in model.named_parameters():
        parameter.grad = _added([own[name] for own in sums])
    return sum(losses[1:], losses[0])


def _added(parts: Sequence[Tensor | None]) -> Tensor | None:
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


class ReplicatedLoop(DelayedLoop):
    """A loop over the batches of replicas that read weights 0 or more updates old."""

    clip: float | None = None
    scale: float = 1.0

    def backward(self, x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensor:
        """Add the gradients of the batches of all replicas to ``.grad`` and clip them."""
        made = train(self.model, self.microbatches, x, y, loss=self.loss, scale=self.scale)
        parameters = list(self.model.parameters())
        for parameter in parameters:
            if parameter.grad is not None and self.scale != 1.0:
                parameter.grad *= 1 / self.scale
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip)
        return made
