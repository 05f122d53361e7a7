"""Kernel: the interface of what runs a stage, by explicit graphs or by autograd.

``GraphKernel`` and ``AutogradKernel`` implement it; ``Discarding`` wraps either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, fx


class ForwardResult(NamedTuple):
    """The results of a stage's forward.

    Attributes:
        outputs: one for each value that leaves the stage along an edge, in the edges' order.
        writes: the new values of the buffers that the stage writes, in the stage's order.
        saved: the values that its backward needs; empty where it has no backward.
    """

    outputs: list[Any]
    writes: list[Tensor]
    saved: list[Any]


class BackwardResult(NamedTuple):
    """The results of a stage's backward.

    Attributes:
        inputs: a gradient for each edge into the stage that carries one back, in their order.
        parameters: for each of the stage's parameters the sum of its gradients so far, this
            micro-batch's included; None where there is none. A new sum has memory of its own,
            so the caller may keep and change it.
    """

    inputs: list[Tensor]
    parameters: list[Tensor | None]


class InputGradResult(NamedTuple):
    """The results of the input-gradient half of a stage's backward.

    Attributes:
        inputs: as in BackwardResult.
        deferred: the values that the weight-gradient half needs; empty when it has no work.
    """

    inputs: list[Tensor]
    deferred: list[Any]


class PartialResult(NamedTuple):
    """The results of a backward, or of its second half, up to a bucket of gradients.

    Attributes:
        left: the values that the rest of it needs; of the rest the gradients of the inputs.
        parameters: as in BackwardResult.
    """

    left: list[Tensor]
    parameters: list[Tensor | None]


Totals = Sequence[Tensor | None]
"""For each of a stage's parameters the sum of its gradients, or None; empty for no sums at all."""


class Kernel(Protocol):
    """A stage made ready to run for one micro-batch size.

    Attributes:
        forward_graph: the graph of forward.
        backward_graph: the graph of backward; None where autograd runs it, or there is none.
        input_grad_graph: the half of backward that other stages wait for; None also where backward
            is not split.
        weight_grad_graph: the half that no other stage waits for; None also where no parameter has
            a gradient.
        parameter_strides: the strides that forward reads each parameter with, which it copies
            where it gets it otherwise; None for any strides. Empty for any of all.
    """

    forward_graph: fx.GraphModule
    backward_graph: fx.GraphModule | None
    input_grad_graph: fx.GraphModule | None
    weight_grad_graph: fx.GraphModule | None
    parameter_strides: Sequence[tuple[int, ...] | None]

    def forward(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], inputs: list[Any]
    ) -> ForwardResult:
        """Run the stage on one micro-batch.

        Args:
            parameters: one for each of the stage's parameters; the caller picks the version.
            buffers: one for each of the stage's buffers.
            inputs: one for each edge into the stage, in order. The list is emptied, so that its
                values can be freed.
        """
        ...

    def backward(
        self, saved: list[Any], gradients: list[Tensor], totals: Totals = ()
    ) -> BackwardResult:
        """Compute the stage's gradients. The first two lists are emptied as they are used.

        Args:
            saved: what ``forward`` saved.
            gradients: one for each output that gets a gradient, in the order of the stage's
                outputs; the gradients of several edges of one value are summed already.
            totals: for each parameter the sum of earlier micro-batches' gradients, to which this
                micro-batch's is added in place; None where there is none. Empty for no sums at all.
        """
        ...

    def input_grad(self, saved: list[Any], gradients: list[Tensor]) -> InputGradResult:
        """Compute the inputs' gradients: the half of ``backward`` that other stages wait for.

        Both halves together give ``backward``'s gradients to the bit. Empties both lists, which are
        as for ``backward``.

        Raises:
            PassError: the stage's backward is not parted.
        """
        ...

    def weight_grad(self, deferred: list[Any], totals: Totals = ()) -> list[Tensor | None]:
        """Compute the parameters' gradients, the other half, of what ``input_grad`` deferred, which
        is emptied. ``totals`` is as for ``backward``. Returns the sums as in BackwardResult.

        Raises:
            PassError: the stage's backward is not parted.
        """
        ...

    def partial_backward(
        self, kind: str, bucket: int, left: list[Any], totals: Totals = ()
    ) -> PartialResult:
        """Compute the gradients of one bucket. All buckets in turn do what the whole does.

        Args:
            kind: "B" for a whole backward, "W" for its second half.
            bucket: which one; the last one is the rest.
            left: what the bucket before left; for the first one, what ``forward`` saved and the
                gradients of outputs, or what ``input_grad`` returned. Emptied.
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
        self.parameter_strides = kernel.parameter_strides

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


class Discarding(Wrapping):
    """Runs a micro-batch of weight 0, and adds no gradients of parameters.

    These gradients are 0, but computing them may give NaN: where the loss divides by the number of
    targets that count, a gradient is 0 times infinity.
    """

    def backward(
        self, saved: list[Any], gradients: list[Tensor], totals: Totals = ()
    ) -> BackwardResult:
        """See Kernel.backward. The gradients of the inputs may be NaN."""
        made = self.kernel.backward(saved, gradients)
        return BackwardResult(made.inputs, list(totals) or [None] * len(made.parameters))

    def weight_grad(self, deferred: list[Any], totals: Totals = ()) -> list[Tensor | None]:
        made = self.kernel.weight_grad(deferred)
        return list(totals) or [None] * len(made)

    def partial_backward(
        self, kind: str, bucket: int, left: list[Any], totals: Totals = ()
    ) -> PartialResult:
        made = self.kernel.partial_backward(kind, bucket, left)
        return PartialResult(made.left, list(totals) or [None] * len(made.parameters))
