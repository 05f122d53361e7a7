"""What one device holds while a program runs: buffers, gradients, the state of buffers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from fxpipe.ir.program import Buffer


class Store:
    """The values on one device during one run. Nothing outlives the run but what is committed.

    Attributes:
        values: the live buffers.
        gradients: stage and batch → the gradients of its parameters so far, None where there is
            none yet.
        state: name in the model → the newest value of a buffer that this run has written.
        kept: stage → micro-batches that are kept now for what is left of their backward.
        peak: stage → the most that were kept at once.
    """

    def __init__(self) -> None:
        self.values: dict[Buffer, Any] = {}
        self.gradients: dict[tuple[int, int], list[torch.Tensor | None]] = {}
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
        """Hand over what was kept for the end of a backward; the store forgets it."""
        self.kept[buffer.source] -= 1
        saved: list[Any] = self.values.pop(buffer)
        return saved

    def age(self, steps: int) -> None:
        """Count batches from so many steps later: this step's batch is then an earlier one."""
        if steps:
            older = {b._replace(batch=b.batch - steps): v for b, v in self.values.items()}
            self.values = older
            sums = {(stage, batch - steps): g for (stage, batch), g in self.gradients.items()}
            self.gradients = sums

    def clear(self) -> None:
        """Let go of everything."""
        self.values.clear()
        self.gradients.clear()
        self.state.clear()
