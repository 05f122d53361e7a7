"""Kernel: the interface for running a stage.

``GraphKernel`` implements it by explicit graphs; subclasses of ``Wrapping`` wrap another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, fx


class ForwardResult(NamedTuple):
    """The results of a stage's forward.

    Attributes:
        outputs: the values that leave the stage along edges, in the edges' order.
        writes: the new values of the buffers that the stage writes, in the stage's order.
        saved: the values that the backward needs; empty if there is no backward.
    """

    outputs: list[Any]
    writes: list[Tensor]
    saved: list[Any]


class BackwardResult(NamedTuple):
    """The results of a stage's backward.

    Attributes:
        inputs: a gradient for each edge into the stage that carries one back, in the edges' order.
        parameters: for each of the stage's parameters the sum of its gradients, including this
            micro-batch's; None if there is none. No other value shares the memory of a new sum,
            so the caller may keep and change it.
    """

    inputs: list[Tensor]
    parameters: list[Tensor | None]


class InputGradResult(NamedTuple):
    """The results of the input-gradient half of a stage's backward.

    Attributes:
        inputs: as in BackwardResult.
        deferred: the values that the weight-gradient half needs; empty if it has no work.
    """

    inputs: list[Tensor]
    deferred: list[Any]


class PartialResult(NamedTuple):
    """The results of a backward, or of its second half, up to a bucket of gradients.

    Attributes:
        left: the values that the next bucket needs; after the last, the gradients of the inputs.
        parameters: as in BackwardResult.
    """

    left: list[Tensor]
    parameters: list[Tensor | None]


Totals = Sequence[Tensor | None]
"""For each of a stage's parameters the sum of its gradients, or None; empty if none has a sum."""


class Kernel(Protocol):
    """A stage made ready to run for one micro-batch size.

    Attributes:
        forward_graph: the graph of forward.
        backward_graph: the graph of backward; None if there is none.
        input_grad_graph: the half of backward that other stages wait for; None also if backward is
            not split.
        weight_grad_graph: the half that no other stage waits for; None also if no parameter has a
            gradient.
    """

    forward_graph: fx.GraphModule
    backward_graph: fx.GraphModule | None
    input_grad_graph: fx.GraphModule | None
    weight_grad_graph: fx.GraphModule | None

    def forward(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], inputs: list[Any]
    ) -> ForwardResult:
        """Run the stage on one micro-batch.

        Args:
            parameters: the stage's parameters; the caller picks the version.
            buffers: the stage's buffers.
            inputs: a value for each edge into the stage, in order. The list is emptied, so that
                its values can be freed.
        """
        ...

    def backward(
        self, saved: list[Any], gradients: list[Tensor], totals: Totals = ()
    ) -> BackwardResult:
        """Compute the stage's gradients. The first two lists are emptied as they are used.

        Args:
            saved: what ``forward`` saved.
            gradients: the gradients of the outputs that get one, in the order of the stage's
                outputs, each summed over the edges of its value.
            totals: for each parameter the sum of earlier micro-batches' gradients, to which this
                micro-batch's is added in place; None if there is none. Empty if there are no sums.
        """
        ...

    def input_grad(self, saved: list[Any], gradients: list[Tensor]) -> InputGradResult:
        """Compute the inputs' gradients: the half of ``backward`` that other stages wait for.

        Both halves together give ``backward``'s gradients to the bit. The lists are those of
        ``backward``, and are emptied. The plan has gone through ``part_backward``.
        """
        ...

    def weight_grad(self, deferred: list[Any], totals: Totals = ()) -> list[Tensor | None]:
        """Compute the parameters' gradients, the other half, from what ``input_grad`` deferred.

        Empties ``deferred``; ``totals`` is as for ``backward``. Returns the sums as in
        BackwardResult.
        """
        ...

    def partial_backward(
        self, kind: str, bucket: int, left: list[Any], totals: Totals = ()
    ) -> PartialResult:
        """Compute the gradients of one bucket. All buckets in turn equal the whole.

        Args:
            kind: "B" for a whole backward, "W" for its second half.
            bucket: index of the bucket; the last one (−1) is the rest of the backward.
            left: what the bucket before left. For the first bucket, what ``forward`` saved and the
                gradients of outputs, or what ``input_grad`` deferred. Emptied.
            totals: as for ``backward``.
        """
        ...


class Wrapping:
    """A kernel that passes every call on to another one.

    Attributes:
        kernel: the wrapped kernel.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.forward_graph = kernel.forward_graph
        self.backward_graph = kernel.backward_graph
        self.input_grad_graph = kernel.input_grad_graph
        self.weight_grad_graph = kernel.weight_grad_graph

    def forward(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], inputs: list[Any]
    ) -> ForwardResult:
        return self.kernel.forward(parameters, buffers, inputs)

    def backward(
        self, saved: list[Any], gradients: list[Tensor], totals: Totals = ()
    ) -> BackwardResult:
        return self.kernel.backward(saved, gradients, totals)

    def input_grad(self, saved: list[Any], gradients: list[Tensor]) -> InputGradResult:
        return self.kernel.input_grad(saved, gradients)

    def weight_grad(self, deferred: list[Any], totals: Totals = ()) -> list[Tensor | None]:
        return self.kernel.weight_grad(deferred, totals)

    def partial_backward(
        self, kind: str, bucket: int, left: list[Any], totals: Totals = ()
    ) -> PartialResult:
        return self.kernel.partial_backward(kind, bucket, left, totals)
