"""The kernel of a stage with explicit forward and backward graphs: no autograd runs in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxpipe.kernels.kernel import (
    BackwardResult,
    ForwardResult,
    InputGradResult,
    PartialResult,
    Totals,
)

COMPILED = "compiled"
"""Key in a graph's ``meta`` if a library runs in its place, here or on another rank."""


def is_compiled(module: fx.GraphModule | None) -> bool:
    """Whether a library runs in a graph's place."""
    return module is not None and COMPILED in module.meta


class BucketGraph(NamedTuple):
    """The graph that computes a bucket of gradients.

    Attributes:
        graph: ``[left, totals]`` → left, new totals.
        left: how many of its results come before the new totals.
        parameters: for each total the position of its parameter among those of the stage.
    """

    graph: fx.GraphModule
    left: int
    parameters: tuple[int, ...]


@dataclass(eq=False, repr=False)
class GraphKernel:
    """Runs a stage for one micro-batch size by explicit graphs, with boxed calling convention.

    Attributes:
        forward_graph: ``[parameters, buffers, inputs]`` → outputs, writes, saved.
        backward_graph: ``[saved, gradients, totals]`` → input gradients, new totals.
        functional_backward: ``[saved, gradients]`` → input gradients, parameter gradients, without
            operations in place; None unless a pass is to split it.
        outputs: how many outputs the forward graph returns.
        writes: how many buffer writes follow them.
        input_strides: the strides that each input was traced with; None for values that are no
            tensors.
        gradient_strides: the strides that each gradient that the backward reads was traced with.
        input_gradients: how many gradients of inputs the backward graph returns.
        parameter_gradients: for each parameter whether the backward graph returns its gradient.
        input_grad_graph: ``[saved, gradients]`` → input gradients, deferred; see ``part_backward``.
        weight_grad_graph: ``[deferred, totals]`` → new totals; None if there are none.
        functional_weight_grad: ``[deferred]`` → parameter gradients, without operations in place.
        buckets: letter of a backward task → for each bucket of gradients the graph
            ``[left, totals]`` → left or input gradients, new totals; see ``part_gradients``.
    """

    forward_graph: fx.GraphModule
    backward_graph: fx.GraphModule | None
    functional_backward: fx.Graph | None
    outputs: int
    writes: int
    input_strides: Sequence[tuple[int, ...] | None]
    gradient_strides: Sequence[tuple[int, ...]]
    input_gradients: int
    parameter_gradients: Sequence[bool]
    input_grad_graph: fx.GraphModule | None = None
    weight_grad_graph: fx.GraphModule | None = None
    functional_weight_grad: fx.Graph | None = None
    buckets: Mapping[str, Sequence[BucketGraph]] = field(default_factory=dict)

    def forward(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], inputs: list[Any]
    ) -> ForwardResult:
        arguments = [*parameters, *buffers, *map(_laid_out, inputs, self.input_strides)]
        inputs.clear()
        flat = self.forward_graph.forward(arguments)
        a, b = self.outputs, self.outputs + self.writes
        return ForwardResult(list(flat[:a]), list(flat[a:b]), list(flat[b:]))

    def backward(
        self, saved: list[Any], gradients: list[Tensor], totals: Totals = ()
    ) -> BackwardResult:
        if self.backward_graph is None:
            saved.clear()
            return BackwardResult([], self._sums(totals))
        arguments, count = self._backward_arguments(saved, gradients), self.input_gradients
        made = self._summed(self.backward_graph, arguments, self._trained, count, totals)
        return BackwardResult(*made)

    def mapped(self, change: Callable[[fx.GraphModule], fx.GraphModule]) -> GraphKernel:
        """The same kernel with ``change`` applied to all of its graph modules."""
        return replace(
            self,
            forward_graph=change(self.forward_graph),
            backward_graph=self.backward_graph and change(self.backward_graph),
            input_grad_graph=self.input_grad_graph and change(self.input_grad_graph),
            weight_grad_graph=self.weight_grad_graph and change(self.weight_grad_graph),
            buckets={
                kind: [bucket._replace(graph=change(bucket.graph)) for bucket in buckets]
                for kind, buckets in self.buckets.items()
            },
        )

    def input_grad(self, saved: list[Any], gradients: list[Tensor]) -> InputGradResult:
        if self.backward_graph is None:
            saved.clear()
            return InputGradResult([], [])
        assert self.input_grad_graph is not None, "run the plan through part_backward"
        flat = self.input_grad_graph.forward(self._backward_arguments(saved, gradients))
        count = self.input_gradients
        return InputGradResult(list(flat[:count]), list(flat[count:]))

    def weight_grad(self, deferred: list[Any], totals: Totals = ()) -> list[Tensor | None]:
        if not self._trained:
            return self._sums(totals)
        assert self.weight_grad_graph is not None, "run the plan through part_backward"
        arguments = [*deferred]
        deferred.clear()
        _, sums = self._summed(self.weight_grad_graph, arguments, self._trained, 0, totals)
        return sums

    def partial_backward(
        self, kind: str, bucket: int, left: list[Any], totals: Totals = ()
    ) -> PartialResult:
        graph, count, parameters = self.buckets[kind][bucket]
        if kind == "B" and bucket == 0:
            first = len(left) - len(self.gradient_strides)
            left[first:] = map(_laid_out, left[first:], self.gradient_strides)
        arguments = [*left]
        left.clear()
        return PartialResult(*self._summed(graph, arguments, parameters, count, totals))

    @cached_property
    def _trained(self) -> list[int]:
        """The parameters whose gradients the backward graph returns."""
        return [index for index, has in enumerate(self.parameter_gradients) if has]

    def _sums(self, totals: Totals) -> list[Tensor | None]:
        """The sum of each parameter's gradients so far."""
        return [*totals] or [None] * len(self.parameter_gradients)

    def _summed(
        self,
        graph: fx.GraphModule,
        arguments: list[Any],
        parameters: Sequence[int],
        count: int,
        totals: Totals,
    ) -> tuple[list[Any], list[Tensor | None]]:
        """Run a graph that adds gradients of these parameters to their sums, which follow its
        ``arguments``. Returns its first ``count`` results, and the new sum of each parameter."""
        sums = self._sums(totals)
        arguments += [sums[index] for index in parameters]
        flat = graph.forward(arguments)
        for index, total in zip(parameters, flat[count:], strict=True):
            sums[index] = total
        return [*flat[:count]], sums

    def _backward_arguments(self, saved: list[Any], gradients: list[Tensor]) -> list[Any]:
        arguments = [*saved, *map(_laid_out, gradients, self.gradient_strides)]
        saved.clear()
        gradients.clear()
        return arguments


def _laid_out(value: Any, strides: tuple[int, ...] | None) -> Any:
    """The value in the strides that the graph was traced with, on which its views depend, but not
    on those of dimensions of size 1: these stay, as later kernels look at them."""
    if strides is None or value.stride() == strides or same_order(value, strides):
        return value
    return torch.empty_strided(
        value.shape, layout(value, strides), dtype=value.dtype, device=value.device
    ).copy_(value)


def same_order(value: Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides, those of dimensions of size 1 aside."""
    pairs = zip(value.shape, value.stride(), strides, strict=True)
    return all(size == 1 or has == wants for size, has, wants in pairs)


def layout(value: Tensor, strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a copy for a graph that was traced with ``strides``.

    If traced elements share memory, as after ``expand`` or ``unfold``, the copy is dense: its
    elements may differ there, and a dense tensor allows all views that the traced one allowed.
    """
    extent = 1
    for stride, size in sorted(zip(strides, value.shape, strict=True)):
        if size > 1 and stride < extent:
            return torch.empty(value.shape, device="meta").stride()
        extent += (size - 1) * stride
    return strides


def onto(
    total: Tensor | None, gradient: Tensor | None, strides: tuple[int, ...] | None = None
) -> Tensor | None:
    """Add a gradient to a sum in place. The first gradient becomes the sum, or a copy of it with
    ``strides`` if its own are different. Without a gradient, the sum stays."""
    if gradient is None:
        return total
    if total is not None:
        return total.add_(gradient)
    if strides is None or gradient.stride() == strides:
        return gradient.detach()  # it may be a view, which would keep its base alive
    return torch.empty_strided(
        gradient.shape, strides, dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)


def strides_of_sum(gradient: Tensor, parameter: Tensor) -> tuple[int, ...] | None:
    """The strides of the sum of a parameter's gradients; None if the gradient has them already.

    As for autograd's ``.grad`` they are the parameter's, or those of a new tensor if the parameter
    is not dense: norms and updates round by the order of memory.
    """
    wanted = parameter.stride()
    if not parameter.is_contiguous():
        like = torch.empty_like(parameter, device="meta").stride()
        wanted = wanted if like == wanted else torch.empty(parameter.shape, device="meta").stride()
    return None if same_order(gradient, wanted) else wanted
