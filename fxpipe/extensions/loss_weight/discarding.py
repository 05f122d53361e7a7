"""Micro-batches of weight 0, which add nothing to the sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxpipe.compiler.compiled import Compiled
from fxpipe.kernels.kernel import BackwardResult, Kernel, PartialResult, Totals, Wrapping


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
