"""The kernel of a stage with leaf modules: calls them as they are; autograd runs backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fxpipe.errors import PassError
from fxpipe.extensions.leaf_modules.draws import SeededDraws, draw_from
from fxpipe.ir.traced import AUTOCAST
from fxpipe.kernels.graph import onto, strides_of_sum, totalled
from fxpipe.kernels.kernel import (
    BackwardResult,
    ForwardResult,
    InputGradResult,
    PartialResult,
    Totals,
)
from fxpipe.torchtools.pytrees import memory
from fxpipe.torchtools.state import Autocasts, uncached, under


class CountedBytes(NamedTuple):
    """The bytes of a stage that no graph tells, as counted in a run of one micro-batch.

    Attributes:
        saved: of what its forward keeps for its backward, beside inputs, outputs and parameters.
        forward: the most that its forward takes at once.
        backward: the most that its backward takes at once, less what it has freed of ``saved``.
        gradients: of its parameters' gradients.
    """

    saved: int = 0
    forward: int = 0
    backward: int = 0
    gradients: int = 0


@dataclass(eq=False, repr=False)
class AutogradKernel:
    """Runs a stage with leaf modules: calls them as they are, and has autograd run backward.

    Attributes:
        forward_graph: a graph that calls leaf modules: inputs → a tuple of the outputs.
        parameters: names, in the graph module, of the parameters that it reads.
        buffers: names of the buffers that it reads.
        written: names of the buffers that its leaf modules may write.
        differentiable: for each input whether it needs a gradient.
        input_gradients: for each input whether its gradient is handed back.
        output_gradients: for each output whether it gets a gradient.
        recording: whether gradients are enabled, which leaf modules may check; False in inference.
        counted: the bytes that it takes for a micro-batch.
    """

    forward_graph: fx.GraphModule
    parameters: Sequence[str]
    buffers: Sequence[str]
    written: Sequence[str]
    differentiable: Sequence[bool]
    input_gradients: Sequence[bool]
    output_gradients: Sequence[bool]
    recording: bool = True
    counted: CountedBytes = field(default_factory=CountedBytes)
    backward_graph: fx.GraphModule | None = None
    input_grad_graph: fx.GraphModule | None = None
    weight_grad_graph: fx.GraphModule | None = None

    def __post_init__(self) -> None:
        nodes = self.forward_graph.graph.nodes
        self._written = frozenset(self.written)
        self._draws = any(node.target is draw_from for node in nodes)
        self._casts = any(node.meta.get(AUTOCAST) for node in nodes)
        self._run = _under_autocast(self.forward_graph) if self._casts else self.forward_graph

    def mapped(self, change: Callable[[fx.GraphModule], fx.GraphModule]) -> AutogradKernel:
        """The same kernel with its graph module changed; it keeps the leaf modules."""
        return replace(self, forward_graph=change(self.forward_graph))

    def forward(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], inputs: list[Any]
    ) -> ForwardResult:
        """See Kernel.forward. ``saved`` holds what autograd keeps."""
        weights = [p.detach().requires_grad_(p.requires_grad) for p in parameters]
        for weight, name in zip(weights, self.parameters, strict=True):
            if attributes := vars(attrgetter(name)(self.forward_graph)):  # set by the user
                vars(weight).update(attributes)
        # modules write their buffers in place, so they get copies, which become the writes
        state = {
            name: buffer.clone() if name in self._written else buffer
            for name, buffer in zip(self.buffers, buffers, strict=True)
        }
        sources = [
            value.detach().requires_grad_(True) if needs else value
            for value, needs in zip(inputs, self.differentiable, strict=True)
        ]
        inputs.clear()
        tensors = dict(zip(self.parameters, weights, strict=True)) | state
        seeded = SeededDraws() if self._draws else nullcontext()
        casts = under(()) if self._casts else nullcontext()
        with torch.set_grad_enabled(self.recording), seeded, casts:
            arguments = tuple(map(uncached, sources)) if self._casts else tuple(sources)
            outputs = torch.func.functional_call(self._run, tensors, arguments)
        keeps = any(self.output_gradients)
        saved = [list(outputs), sources, weights] if keeps else []
        return ForwardResult(
            [out.detach() if isinstance(out, Tensor) else out for out in outputs],
            [tensors[name] for name in self.written],
            saved,
        )

    def backward(
        self, saved: list[Any], gradients: list[Tensor], totals: Totals = ()
    ) -> BackwardResult:
        if not saved:
            return BackwardResult([], totalled(totals, [None] * len(self.parameters)))
        wanted = [x for x, has in zip(saved[1], self.input_gradients, strict=True) if has]
        inputs, fresh = self.differentiated(saved, gradients)
        zeros = (
            torch.zeros_like(x) if gradient is None else gradient
            for x, gradient in zip(wanted, inputs, strict=True)
        )
        return BackwardResult([*zeros], totalled(totals, fresh))

    def differentiated(
        self, saved: list[Any], gradients: list[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The gradients of the inputs that hand one back, and of the parameters, which share no
        memory; None where autograd finds none. Arguments are those of ``backward``."""
        outputs, sources, weights = saved
        saved.clear()
        roots = [out for out, has in zip(outputs, self.output_gradients, strict=True) if has]
        del outputs
        wanted = [x for x, has in zip(sources, self.input_gradients, strict=True) if has]
        count = len(wanted)
        trained = [weight for weight in weights if weight.requires_grad]
        received = [*gradients]
        # a thread of autograd's own would hold the gradients for a moment longer
        with torch.autograd.set_multithreading_enabled(False):
            computed: list[Tensor | None] = list(
                torch.autograd.grad(roots, [*wanted, *trained], gradients, allow_unused=True)
                if wanted or trained
                else ()
            )
        gradients.clear()
        del roots
        inputs, rest = computed[:count], computed[count:]
        rest.reverse()
        del computed  # where a gradient is copied, it is freed before the next one is
        shared = {memory(x) for x in (*inputs, *received) if x is not None}
        del received
        fresh: list[Tensor | None] = []
        for weight in weights:
            gradient = rest.pop() if weight.requires_grad else None
            if gradient is not None:
                whole = gradient.untyped_storage().nbytes() == gradient.nbytes
                if not whole or memory(gradient) in shared:
                    gradient = gradient.clone()  # sums are changed in place, so they share nothing
                gradient = onto(None, gradient, strides_of_sum(gradient, weight))
                shared.add(memory(gradient))
            fresh.append(gradient)
        return inputs, fresh

    def input_grad(self, saved: list[Any], gradients: list[Tensor]) -> InputGradResult:
        """See Kernel.input_grad.

        Autograd computes all gradients here, and the parameters' gradients are deferred as they
        are: running it once for each half would compute the gradients between the layers twice.
        """
        return InputGradResult(*self.backward(saved, gradients))

    def weight_grad(self, deferred: list[Any], totals: Totals = ()) -> list[Tensor | None]:
        """See Kernel.weight_grad. Adds the gradients that ``input_grad`` has computed."""
        gradients = list(deferred)
        deferred.clear()
        return totalled(totals, gradients)

    def partial_backward(
        self, kind: str, bucket: int, left: list[Any], totals: Totals = ()
    ) -> PartialResult:
        """Raise PassError: no plan has buckets for leaf modules."""
        raise PassError("autograd computes all gradients at once; sum them in one bucket")


def _under_autocast(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, whose nodes each run under the autocast they were traced under."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        casts = node.meta.get(AUTOCAST)
        if not casts or node.op not in ("call_function", "call_module"):
            continue
        function: Any = node.target
        if node.op == "call_module":
            with graph.inserting_before(node):
                node.args = (graph.get_attr(str(node.target)), *node.args)
            function = nn.Module.__call__
        node.op, node.target = "call_function", _called_under(casts, function)
    return fx.GraphModule(module, graph)


def _called_under(casts: Autocasts, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function such that it runs under these autocasts."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with under(casts):
            return function(*args, **kwargs)

    return called
