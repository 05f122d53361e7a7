"""What one device holds while a program runs: buffers, gradients, the state of buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from fxpipe.program import Buffer


class Store:
    """The values on one device during one run. Nothing outlives the run but what is committed.

    Attributes:
        values: the live buffers.
        gradients: stage → the gradients of its parameters so far, None where there is none yet.
        state: name in the model → the newest value of a buffer that this run has written.
        kept: stage → micro-batches whose saved values are alive now.
        peak: stage → the most that were alive at once.
    """

    def __init__(self) -> None:
        self.values: dict[Buffer, Any] = {}
        self.gradients: dict[int, list[torch.Tensor | None]] = {}
        self.state: dict[str, torch.Tensor] = {}
        self.kept: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()

    def keep(self, buffer: Buffer, saved: list[Any]) -> None:
        """Hold what a forward saved, and count it."""
        self.values[buffer] = saved
        stage = buffer.source
        self.kept[stage] += 1
        self.peak[stage] = max(self.peak[stage], self.kept[stage])

    def take(self, buffer: Buffer) -> list[Any]:
        """Hand over what a forward saved; the store forgets it."""
        self.kept[buffer.source] -= 1
        saved: list[Any] = self.values.pop(buffer)
        return saved

    def accumulate(
        self,
        stage: int,
        gradients: Sequence[torch.Tensor | None],
        before: Sequence[torch.Tensor | None],
    ) -> None:
        """Add one micro-batch's gradients, in place but for the first.

        Args:
            stage: the stage.
            gradients: one for each of its parameters; fresh tensors, which the store keeps.
            before: what the caller's own gradients hold and the sum shall start from.
        """
        totals = self.gradients.get(stage)
        if totals is None:
            totals = self.gradients[stage] = [None] * len(gradients)
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = totals[index]
            if total is not None:
                total.add_(gradient)
            elif (start := before[index]) is not None:
                totals[index] = start + gradient
            else:
                totals[index] = gradient

    def clear(self) -> None:
        """Let go of everything."""
        self.values.clear()
        self.gradients.clear()
        self.state.clear()
