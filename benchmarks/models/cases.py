"""Each model with a small random configuration, a batch and a loss: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Batch:
    """What one training step is given; dimension 0 of every tensor is the batch.

    Attributes:
        args: positional inputs.
        kwargs: keyword inputs.
        target: what the loss compares with, one tensor or a tuple; None for the model's own loss.
    """

    args: tuple[Tensor, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None


@dataclass(frozen=True)
class Case:
    """A model to train.

    Attributes:
        name: of the model.
        model: makes it.
        batch: makes a batch of so many samples.
        loss: ``loss(output, *targets)``; None where the model returns its loss as ``.loss``.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Loss | None = None
