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
    def forward_graph(self) -> fx.GraphModule:
        """What runs forward, as a graph to look at."""
        ...

    @property
    def backward_graph(self) -> fx.GraphModule | None:
        """What runs backward, or None where autograd does, or nothing needs to."""
        ...

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

    def backward(self, saved: list[Any], gradients: list[torch.Tensor]) -> Backwarded:
        """Gradients of the stage. Both lists are emptied as they are used.

        Args:
            saved: what ``forward`` kept.
            gradients: one for each value that some edge carries a gradient back for, in the
                order of the stage's outputs; several edges of one value are summed already.
        """
        ...


class GraphKernel:
    """A stage whose forward and backward are two explicit graphs, made for one size."""

    def __init__(
        self,
        forward_graph: fx.GraphModule,
        backward_graph: fx.GraphModule | None,
        *,
        outputs: int,
        writes: int,
        input_strides: Sequence[tuple[int, ...] | None],
        gradient_outputs: Sequence[int],
        gradient_strides: Sequence[tuple[int, ...]],
        input_gradients: int,
        parameters: Sequence[bool],
    ) -> None:
        """Wrap two graphs with the boxed calling convention.

        Args:
            forward_graph: ``[parameters, buffers, inputs]`` → outputs, writes, saved.
            backward_graph: ``[saved, gradients]`` → input gradients, parameter gradients.
            outputs: how many outputs the forward graph returns.
            writes: how many buffer writes follow them.
            input_strides: the strides that each input was traced with; None for no tensor.
            gradient_outputs: which of the outputs get a gradient.
            gradient_strides: the strides that each of these was traced with.
            input_gradients: how many gradients of inputs the backward graph returns.
            parameters: for each parameter whether the backward graph returns its gradient.
        """
        self.forward_graph = forward_graph
        self.backward_graph = backward_graph
        self.outputs = outputs
        self.writes = writes
        self.gradient_outputs = tuple(gradient_outputs)
        self._input_strides = tuple(input_strides)
        self._gradient_strides = tuple(gradient_strides)
        self._input_gradients = input_gradients
        self._parameters = tuple(parameters)
        self._run_forward = forward_graph.forward
        self._run_backward = None if backward_graph is None else backward_graph.forward

    def forward(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        inputs: list[Any],
    ) -> Forwarded:
        """See Kernel.forward."""
        arguments = [*parameters, *buffers, *map(_laid_out, inputs, self._input_strides)]
        inputs.clear()
        flat = self._run_forward(arguments)
        a, b = self.outputs, self.outputs + self.writes
        return Forwarded(list(flat[:a]), list(flat[a:b]), list(flat[b:]))

    def backward(self, saved: list[Any], gradients: list[torch.Tensor]) -> Backwarded:
        """See Kernel.backward."""
        if self._run_backward is None:
            saved.clear()
            return Backwarded([], [None] * len(self._parameters))
        arguments = [*saved, *map(_laid_out, gradients, self._gradient_strides)]
        saved.clear()
        gradients.clear()
        flat = self._run_backward(arguments)
        rest = iter(flat[self._input_gradients :])
        return Backwarded(
            list(flat[: self._input_gradients]),
            [next(rest) if has else None for has in self._parameters],
        )


def _laid_out(value: Any, strides: tuple[int, ...] | None) -> Any:
    """The value with the strides that its graph was traced for, which decide about views."""
    if strides is None or value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(
        value
    )


class AutogradKernel:
    """A stage with leaf modules: they are called as they are, and autograd drives backward."""

    backward_graph: fx.GraphModule | None = None

    def __init__(
        self,
        graph: fx.GraphModule,
        *,
        parameters: Sequence[str],
        buffers: Sequence[str],
        written: Sequence[str],
        differentiable: Sequence[bool],
        input_gradients: Sequence[bool],
        output_gradients: Sequence[bool],
    ) -> None:
        """Wrap a graph that calls leaf modules.

        Args:
            graph: inputs → a tuple of the outputs.
            parameters: names, in the graph module, of the parameters that it reads.
            buffers: names of the buffers that it reads.
            written: names of the buffers that its leaf modules may write.
            differentiable: for each input whether it needs a gradient.
            input_gradients: for each input whether its gradient is handed back.
            output_gradients: for each output whether it gets a gradient.
        """
        self.forward_graph = graph
        self._parameters = tuple(parameters)
        self._buffers = tuple(buffers)
        self._written = frozenset(written)
        self._order = tuple(written)
        self._differentiable = tuple(differentiable)
        self._input_gradients = tuple(input_gradients)
        self._output_gradients = tuple(output_gradients)

    def forward(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        inputs: list[Any],
    ) -> Forwarded:
        """See Kernel.forward. ``saved`` holds what autograd keeps."""
        weights = [p.detach().requires_grad_(p.requires_grad) for p in parameters]
        # modules write their buffers in place: they get copies, and these are the writes
        state = {
            name: buffer.clone() if name in self._written else buffer
            for name, buffer in zip(self._buffers, buffers, strict=True)
        }
        sources = [
            value.detach().requires_grad_(True) if needs else value
            for value, needs in zip(inputs, self._differentiable, strict=True)
        ]
        inputs.clear()
        tensors = dict(zip(self._parameters, weights, strict=True)) | state
        with torch.enable_grad():
            outputs = torch.func.functional_call(self.forward_graph, tensors, tuple(sources))
        keeps = any(self._output_gradients)
        saved = [list(outputs), sources, weights] if keeps else []
        return Forwarded(
            [out.detach() if isinstance(out, torch.Tensor) else out for out in outputs],
            [tensors[name] for name in self._order],
            saved,
        )

    def backward(self, saved: list[Any], gradients: list[torch.Tensor]) -> Backwarded:
        """See Kernel.backward."""
        if not saved:
            return Backwarded([], [None] * len(self._parameters))
        outputs, sources, weights = saved
        saved.clear()
        roots = [out for out, has in zip(outputs, self._output_gradients, strict=True) if has]
        del outputs
        wanted = [x for x, has in zip(sources, self._input_gradients, strict=True) if has]
        count = len(wanted)
        trained = [weight for weight in weights if weight.requires_grad]
        found: list[torch.Tensor | None] = list(
            torch.autograd.grad(roots, [*wanted, *trained], gradients, allow_unused=True)
            if wanted or trained
            else ()
        )
        gradients.clear()
        del roots
        seen: set[int] = set()
        for index in range(count):
            if found[index] is None:
                found[index] = torch.zeros_like(wanted[index])
            seen.add(_storage(found[index]))
        rest = iter(found[count:])
        fresh: list[torch.Tensor | None] = []
        for weight in weights:
            gradient = next(rest) if weight.requires_grad else None
            if gradient is not None and (gradient._base is not None or _storage(gradient) in seen):
                gradient = gradient.clone()
            if gradient is not None:
                seen.add(_storage(gradient))
            fresh.append(gradient)
        return Backwarded([g for g in found[:count] if g is not None], fresh)


def _storage(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().data_ptr()


def add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of a value's gradients, from the first part on; no part is changed."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
