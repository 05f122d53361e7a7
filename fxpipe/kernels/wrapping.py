"""A kernel around another: it does as that one does, and a subclass says what else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from fxpipe.kernels.kernel import Backwarded, Forwarded, InputGraded, Kernel, Totals


class Wrapping:
    """Hands every call on. See Kernel.

    Attributes:
        kernel: the other.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    @property
    def forward_graph(self) -> fx.GraphModule:
        """See Kernel.forward_graph."""
        return self.kernel.forward_graph

    @property
    def backward_graph(self) -> fx.GraphModule | None:
        """See Kernel.backward_graph."""
        return self.kernel.backward_graph

    @property
    def input_grad_graph(self) -> fx.GraphModule | None:
        """See Kernel.input_grad_graph."""
        return self.kernel.input_grad_graph

    @property
    def weight_grad_graph(self) -> fx.GraphModule | None:
        """See Kernel.weight_grad_graph."""
        return self.kernel.weight_grad_graph

    def forward(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], inputs: list[Any]
    ) -> Forwarded:
        """See Kernel.forward."""
        return self.kernel.forward(parameters, buffers, inputs)

    def backward(
        self, saved: list[Any], gradients: list[Tensor], totals: Totals = ()
    ) -> Backwarded:
        """See Kernel.backward."""
        return self.kernel.backward(saved, gradients, totals)

    def input_grad(self, saved: list[Any], gradients: list[Tensor]) -> InputGraded:
        """See Kernel.input_grad."""
        return self.kernel.input_grad(saved, gradients)

    def weight_grad(self, deferred: list[Any], totals: Totals = ()) -> list[Tensor | None]:
        """See Kernel.weight_grad."""
        return self.kernel.weight_grad(deferred, totals)
