"""What runs a stage: one interface, whether its graphs are explicit or autograd drives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx


class Forwarded(NamedTuple):
    """What a stage's forward gives.

    Attributes:
        outputs: one for each value that the stage's edges carry away, in their order.
        writes: the new values of the buffers that the stage writes, in the stage's order.
        saved: what its backward needs; empty when nothing is kept.
    """

    outputs: list[Any]
    writes: list[torch.Tensor]
    saved: list[Any]


class Backwarded(NamedTuple):
    """What a stage's backward gives.

    Attributes:
        inputs: one for each edge into the stage that carries a gradient back, in their order.
        parameters: one for each of the stage's parameters; None where there is no gradient. The
            tensors are fresh: the caller may keep and change them.
    """

    inputs: list[torch.Tensor]
    parameters: list[torch.Tensor | None]


class Kernel(Protocol):
    """A stage made ready to run for one micro-batch size."""

    @property
    def forward_graph(self) -> fx.GraphModule: ...

    @property
    def backward_graph(self) -> fx.GraphModule | None: ...

    def forward(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        inputs: list[Any],
        keeps: bool,
    ) -> Forwarded:
        """Run the stage on one micro-batch. ``inputs`` is emptied, so that they can be freed."""
        ...

    def backward(self, saved: list[Any], gradients: list[torch.Tensor]) -> Backwarded:
        """Gradients of the stage. Both lists are emptied as they are used.

        Args:
            saved: what ``forward`` kept.
            gradients: one for each value that some edge carries a gradient back for, in the
                order of the stage's outputs; several edges of one value are summed already.
        """
        ...
