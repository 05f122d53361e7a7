"""What runs a stage: one interface, whether its graphs are explicit or autograd drives it.

``GraphKernel`` and ``AutogradKernel`` are the two; ``Discarding`` wraps either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx


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
        parameters: for each of the stage's parameters the sum of its gradients so far, this
            micro-batch's among them; None where there is none. A sum that begins here is in
            memory of its own: the caller may keep and change it.
    """

    inputs: list[torch.Tensor]
    parameters: list[torch.Tensor | None]


class InputGraded(NamedTuple):
    """What the input-gradient half of a stage's backward gives.

    Attributes:
        inputs: as those of Backwarded.
        deferred: what the weight-gradient half needs, and nothing else; empty when it has no work.
    """

    inputs: list[torch.Tensor]
    deferred: list[Any]


Totals = Sequence[torch.Tensor | None]
"""For each of a stage's parameters the sum of its gradients, or None; empty for no sums at all."""


class Kernel(Protocol):
    """A stage made ready to run for one micro-batch size.

    Attributes:
        forward_graph: what runs forward, as a graph to look at.
        backward_graph: what runs backward, or None where autograd does, or nothing needs to.
        input_grad_graph: the half of backward that others wait for; None also where it is not
            parted.
        weight_grad_graph: the half that nobody waits for; None also where no parameter has a
            gradient.
    """

    forward_graph: fx.GraphModule
    backward_graph: fx.GraphModule | None
    input_grad_graph: fx.GraphModule | None
    weight_grad_graph: fx.GraphModule | None

    def forward(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        inputs: list[Any],
    ) -> Forwarded:
        """Run the stage on one micro-batch.

        Args:
            parameters: one for each of the stage's parameters; the caller picks the version.
            buffers: one for each of the stage's buffers.
            inputs: one for each edge into the stage, in order; emptied, so that they can be freed.
        """
        ...

    def backward(
        self, saved: list[Any], gradients: list[torch.Tensor], totals: Totals = ()
    ) -> Backwarded:
        """Gradients of the stage. The first two lists are emptied as they are used.

        Args:
            saved: what ``forward`` kept.
            gradients: one for each value that some edge carries a gradient back for, in the
                order of the stage's outputs; several edges of one value are summed already.
            totals: for each parameter the sum of earlier micro-batches' gradients, which this
                one's is added to in place; None where there is none. Empty: none anywhere.
        """
        ...

    def input_grad(self, saved: list[Any], gradients: list[torch.Tensor]) -> InputGraded:
        """The gradients of the inputs: the half of ``backward`` that other stages wait for.

        Both halves together give ``backward``'s gradients to the bit. Both lists are emptied.

        Args:
            saved: as for ``backward``.
            gradients: as for ``backward``.

        Raises:
            PassError: the stage's backward is not parted.
        """
        ...

    def weight_grad(self, deferred: list[Any], totals: Totals = ()) -> list[torch.Tensor | None]:
        """The other half: for each parameter the sum so far, as in Backwarded.

        Args:
            deferred: what ``input_grad`` left for it; emptied.
            totals: as for ``backward``.

        Raises:
            PassError: the stage's backward is not parted.
        """
        ...


class Wrapping:
    """A kernel around another one: hands every call on.

    Attributes:
        kernel: the other.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.forward_graph = kernel.forward_graph
        self.backward_graph = kernel.backward_graph
        self.input_grad_graph = kernel.input_grad_graph
        self.weight_grad_graph = kernel.weight_grad_graph

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


class Discarding(Wrapping):
    """Runs as the kernel does, but gives parameters no gradient: for a micro-batch of weight 0.

    Its gradient is 0. Computed, it may come out as not-a-number instead: where the loss divides by
    the number of targets that count, it is 0 times infinity.
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
