"""A stage's kernel for a micro-batch whose loss counts for nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fxpipe.kernels.kernel import Backwarded, Totals
from fxpipe.kernels.wrapping import Wrapping


class Discarding(Wrapping):
    """Runs as the kernel does, but gives parameters no gradient.

    That of a micro-batch of weight 0 is 0 by right, and where its loss divides by how much of it
    counts, a 0 times infinity would come out as not-a-number.
    """

    def backward(
        self, saved: list[Any], gradients: list[Tensor], totals: Totals = ()
    ) -> Backwarded:
        """See Kernel.backward. The gradients of the inputs may be not-a-number."""
        made = self.kernel.backward(saved, gradients)
        return Backwarded(made.inputs, list(totals) or [None] * len(made.parameters))

    def weight_grad(self, deferred: list[Any], totals: Totals = ()) -> list[Tensor | None]:
        """See Kernel.weight_grad."""
        made = self.kernel.weight_grad(deferred)
        return list(totals) or [None] * len(made)
