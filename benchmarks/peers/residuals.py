"""The model of ``examples.attention_residuals``, whose blocks read what all earlier ones gave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from benchmarks.peers.case import Case
from examples import attention_residuals as example

STAGES = example.DEVICES


class Part(nn.Module):
    """A stage that is given all earlier values, and gives them with its own to the next one."""

    def __init__(self, model: example.Transformer, stage: int) -> None:
        super().__init__()
        each = example.BLOCKS // STAGES
        self.blocks = model.blocks[stage * each : (stage + 1) * each]
        self.words = model.words if stage == 0 else None
        self.positions = model.positions if stage == 0 else None
        self.last = model.last if stage == STAGES - 1 else None

    def forward(self, *given: Any) -> Any:
        """From the words or the earlier values to all values, or to the scores."""
        values: list[Tensor] = list(given[0] if isinstance(given[0], tuple) else given)
        if self.words is not None and self.positions is not None:
            values = [self.words(values[0]) + self.positions.weight]
        for block in self.blocks:
            values.append(block(values))
        if self.last is None:
            return tuple(values)
        return self.last(rms_norm(torch.stack(values).sum(0), (example.WIDTH,)))


CASE = Case(
    net=f"transformer with attention residuals, {example.BLOCKS} blocks",
    batch=f"{example.BATCH} of {example.LENGTH} words",
    model=example.Transformer,
    shape=(example.BATCH, example.LENGTH),
    microbatches=example.MICROBATCHES,
    update="Adam",
    rounds=15,
    cuts=tuple(example.CUTS),
    loss=example.loss_of,
    data=lambda: example.batch(0),
    parts=lambda model: [Part(model, stage) for stage in range(STAGES)],
)
