"""Trace a stage's forward and backward together into one graph.

before:  stage graph
after:   parameters, buffers, inputs, output gradients
         → outputs, buffer writes, input gradients, parameter gradients
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.errors import TraceError
from fxpipe.extend import option
from fxpipe.ir.plan import Stage
from fxpipe.ir.traced import AUTOCAST
from fxpipe.ir.value import Edge
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.differentiate.split_joint import split_joint
from fxpipe.torchtools.pytrees import bytes_of
from fxpipe.torchtools.state import autocasts, uncached, under

aten = torch.ops.aten

ORIGIN = "fxpipe.origin"
"""Key of a traced node's ``custom`` metadata: the node of the stage's graph that it comes from."""

BYTES = "fxpipe.bytes"
"""Key of a node's metadata in a stage's graph: the bytes of its value when it was traced."""


_INHERITED = ("custom", "stack_trace", "nn_module_stack", "source_fn_stack")
"""Metadata that the nodes traced from a node inherit from it."""


class NotRecorded(Exception):
    """An operation writes memory that others may see, has no overload, or reads a tensor that is
    neither an argument nor computed inside."""


class Recorder(AbstractContextManager[Any], Protocol):
    """What an extension brings to trace stages sooner than ``make_fx``. Inside, it records each
    operation.

    Attributes:
        meta: the metadata that new nodes get.
    """

    meta: Mapping[str, Any]

    def place(self, arguments: Sequence[Any]) -> list[Any]:
        """Add arguments, and return them; a tensor that occurs again is replaced by an alias."""

    def finish(self, returned: Sequence[Any]) -> fx.Graph:
        """Let the graph return these values, and return the graph."""


@dataclass(frozen=True)
class Sides:
    """What a run of a stage's graph computes.

    Attributes:
        outputs: the stage's outputs, in order.
        writes: the values that it writes to buffers.
        values: the value of each node, by name.
        origins: autograd node → the graph's node that created it.
    """

    outputs: list[Any]
    writes: list[Tensor]
    values: Mapping[str, Any]
    origins: Mapping[torch.autograd.graph.Node, fx.Node]


@dataclass(frozen=True)
class StageSides:
    """A stage's graph as a function of parameters, buffers and inputs.

    Attributes:
        stage: the stage.
        incoming: the edges into the stage, in the order of the inputs.
        returned: the outputs in order.
    """

    stage: Stage
    incoming: Sequence[Edge]
    returned: Sequence[str]

    def run(
        self,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        inputs: Sequence[Any],
        recorder: Recorder | None = None,
    ) -> Sides:
        """Interpret the graph node by node."""
        arguments = (*self.stage.parameters, *self.stage.buffers)
        names = [*(a.name for a in arguments), *(edge.value for edge in self.incoming)]
        received = inputs if not autocasts() else [*map(uncached, inputs)]
        given: dict[str, Any] = dict(zip(names, [*parameters, *buffers, *received], strict=True))
        interpreter = _StageInterpreter(self.stage.graph, recorder)
        order = [n.name for n in self.stage.graph.graph.nodes if n.op == "placeholder"]
        returned = interpreter.run(*(given[name] for name in order))
        if recorder is not None:
            recorder.meta = {}
        arriving = {id(tensor) for tensor in given.values()}
        outputs = [
            # a parameter that is sent must be a tensor of its own, to get its own gradient
            out.view_as(out) if isinstance(out, Tensor) and id(out) in arriving else out
            for out in (interpreter.values[name] for name in self.returned)
        ]
        writes = list(returned[len(returned) - len(self.stage.writes) :])
        return Sides(outputs, writes, interpreter.values, interpreter.origins)


class _StageInterpreter(fx.Interpreter):
    """Runs a stage's graph, and notes what ``Sides`` has of each node."""

    def __init__(self, module: fx.GraphModule, recorder: Recorder | None) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.recorder = recorder
        self.values: dict[str, Any] = {}
        self.origins: dict[torch.autograd.graph.Node, fx.Node] = {}

    def run_node(self, n: fx.Node) -> Any:
        n.meta["custom"] = {**n.meta.get("custom", {}), ORIGIN: n.name}
        if self.recorder is not None:
            self.recorder.meta = inherited(n)
        with under(n.meta[AUTOCAST]) if AUTOCAST in n.meta else nullcontext():
            value = self._run(n)
        self.values[n.name] = value
        self._remember(n, value)
        return value

    def _run(self, n: fx.Node) -> Any:
        if self.recorder is None:
            return super().run_node(n)  # which also tells PyTorch's tracer the node that runs
        return getattr(self, n.op)(n.target, *self.fetch_args_kwargs_from_env(n))

    def _remember(self, n: fx.Node, value: Any) -> None:
        """Note ``n`` as the origin of all autograd nodes that are new since the last call."""
        fresh = [
            leaf.grad_fn
            for leaf in (value if isinstance(value, list | tuple) else [value])
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None
        ]
        while fresh:
            node = fresh.pop()
            if node in self.origins:
                continue
            self.origins[node] = n
            fresh += [parent for parent, _ in node.next_functions if parent is not None]


class JointTrace:
    """A stage traced on fake tensors: its forward at once, its backward when the gradients of its
    outputs are known. Use it inside the tensors' mode.

    Attributes:
        outputs: the stage's outputs, in order.
    """

    def __init__(
        self,
        sides: StageSides,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        inputs: Sequence[Any],
    ) -> None:
        """Trace the forward of a stage on fake tensors, whose ``requires_grad`` must be set."""
        self._sides = sides
        self._buffers = slice(len(parameters), len(parameters) + len(buffers))
        self._arguments = [*parameters, *buffers, *inputs]
        sources = [*inputs, *parameters]
        self._asked = [isinstance(x, Tensor) and x.requires_grad for x in sources]
        self._recorder: Recorder | None = None
        self._given: Sequence[Any] = self._arguments
        try:
            if (recorder := option("recorder")) is not None:
                self._recorder = recorder()
                self._given = self._recorder.place(self._arguments)
            with self._recorder or nullcontext():
                self._result = self._forward(self._given, self._recorder)
        except NotRecorded:
            self._recorder = None
            self._result = self._forward(self._arguments, None)
        self.outputs: Sequence[Any] = self._result.outputs
        for node in sides.stage.graph.graph.nodes:
            node.meta[BYTES] = bytes_of(self._result.values[node.name])

    def kernel(
        self, gradients: Sequence[Tensor | None], functional: bool
    ) -> tuple[GraphKernel, Sequence[Tensor | None]]:
        """Trace the backward; return the stage's kernel, and for each input its gradient or None.

        Args:
            gradients: for each output the fake gradient that it will get, or None.
            functional: whether the kernel keeps its functional backward.
        """
        given = [gradient for gradient in gradients if gradient is not None]
        has = [gradient is not None for gradient in gradients]
        try:
            graph, computed = self._recorded(given, has)
        except NotRecorded:
            graph, computed = self._traced(given, has)
        for node in graph.nodes:
            node.target = FITTED.get(node.target, node.target)
        stage, returned = self._sides.stage, self._sides.returned
        inputs = self._arguments[self._buffers.stop :]
        of_inputs, of_parameters = computed[: len(inputs)], computed[len(inputs) :]
        names = [
            *(argument.name for argument in (*stage.parameters, *stage.buffers)),
            *(edge.value for edge in self._sides.incoming),
            *(f"gradient_{name}" for name, wanted in zip(returned, has, strict=True) if wanted),
        ]
        kept = len(returned) + len(stage.writes)
        parameters = self._arguments[: self._buffers.start]
        for argument, gradient in zip(stage.parameters, of_parameters, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise TraceError(
                    f"the gradient of {argument.target!r} is {gradient.layout}, which cannot be "
                    "added up over micro-batches; make it dense, as with "
                    "nn.Embedding(..., sparse=False)"
                )
        pairs = zip(parameters, of_parameters, strict=True)
        trained = [parameter for parameter, gradient in pairs if gradient is not None]
        kernel = GraphKernel(
            *split_joint(
                graph, stage.index, names, len(self._arguments), kept, trained, functional
            ),
            outputs=len(returned),
            writes=len(stage.writes),
            input_strides=tuple(map(_strides, inputs)),
            gradient_strides=tuple(gradient.stride() for gradient in given),
            input_gradients=sum(gradient is not None for gradient in of_inputs),
            parameter_gradients=tuple(gradient is not None for gradient in of_parameters),
        )
        return kernel, of_inputs

    def _recorded(
        self, given: Sequence[Tensor], has: Sequence[bool]
    ) -> tuple[fx.Graph, list[Tensor | None]]:
        """The joint graph by the recorder, and the gradients of inputs and parameters."""
        recorder = self._recorder
        if recorder is None:
            raise NotRecorded
        placed = recorder.place(given)
        with recorder:
            computed = self._gradients(self._result, self._given, placed, has, recorder)
        return recorder.finish(_all(self._result, computed)), computed

    def _traced(
        self, given: Sequence[Tensor], has: Sequence[bool]
    ) -> tuple[fx.Graph, list[Tensor | None]]:
        """Trace forward and backward with ``make_fx``, which can trace any stage."""
        count = len(self._arguments)
        computed: list[Tensor | None] = []

        def joint(flat: list[Any]) -> list[Any]:
            with fx_traceback.preserve_node_meta():
                result = self._forward(flat[:count], None)
                computed[:] = self._gradients(result, flat[:count], flat[count:], has, None)
            return _all(result, computed)

        arguments = [*self._arguments, *given]
        return _functional(make_fx(joint)(arguments), arguments).graph, computed

    def _forward(self, given: Sequence[Any], recorder: Recorder | None) -> Sides:
        start, stop = self._buffers.start, self._buffers.stop
        with torch.enable_grad():
            return self._sides.run(given[:start], given[start:stop], given[stop:], recorder)

    def _gradients(
        self,
        result: Sides,
        given: Sequence[Any],
        gradients: Sequence[Tensor],
        has: Sequence[bool],
        recorder: Recorder | None,
    ) -> list[Tensor | None]:
        """For each input, then for each parameter, its gradient or None."""
        sources = [*given[self._buffers.stop :], *given[: self._buffers.start]]
        roots = [out for out, wanted in zip(result.outputs, has, strict=True) if wanted]
        wanted = [x for x, needs in zip(sources, self._asked, strict=True) if needs]
        if not roots or not wanted:
            return [None] * len(sources)
        with torch.enable_grad(), _blamed(result.origins, recorder):
            values = iter(torch.autograd.grad(roots, wanted, gradients, allow_unused=True))
        return [next(values) if needs else None for needs in self._asked]


def inherited(node: fx.Node) -> Mapping[str, Any]:
    """The metadata that the nodes traced from a node inherit from it."""
    return {key: node.meta[key] for key in _INHERITED if key in node.meta}


def _all(result: Sides, gradients: Sequence[Tensor | None]) -> list[Any]:
    """The values that a joint graph returns."""
    return [*result.outputs, *result.writes, *(g for g in gradients if g is not None)]


def _functional(module: fx.GraphModule, arguments: list[Any]) -> fx.GraphModule:
    """The graph without in-place operations, which some gradients consist of.

    A graph with such operations cannot be split: a read after a write could move before it.
    """
    if not any(_is_mutable(node) for node in module.graph.nodes):
        return module

    def again(flat: list[Any]) -> Any:
        with fx_traceback.preserve_node_meta():
            return fx.Interpreter(module).run(flat)

    with torch.no_grad():
        return make_fx(torch.func.functionalize(again, remove="mutations"))(arguments)


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def rnn_layer_with_workspace(*args: Any) -> Any:
    """``aten.mkldnn_rnn_layer`` with the workspace that its backward reads, which it returns only
    where gradients are enabled."""
    args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
    with torch.enable_grad():
        return aten.mkldnn_rnn_layer.default(*args)


@wraps(aten.native_group_norm.default, (), ())  # who asks for the schema sees PyTorch's
def group_norm(x: Tensor, *args: Any) -> Any:
    """``aten.native_group_norm`` of a tensor with any strides."""
    return aten.native_group_norm.default(x.contiguous(memory_format=_order(x)), *args)


@wraps(aten.native_group_norm_backward.default, (), ())
def group_norm_backward(gradient: Tensor, x: Tensor, *args: Any) -> Any:
    """``aten.native_group_norm_backward`` of tensors with any strides."""
    order = _order(x)
    given = gradient.contiguous(memory_format=order), x.contiguous(memory_format=order)
    return aten.native_group_norm_backward.default(*given, *args)


def _order(x: Tensor) -> torch.memory_format:
    """The memory format that ``torch.group_norm`` computes in."""
    return suggest_memory_format(x) if x.is_cpu else torch.contiguous_format


FITTED: Mapping[Any, Any] = {
    aten.mkldnn_rnn_layer.default: rnn_layer_with_workspace,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.view.default: aten.reshape.default,
}
"""Operation of a trace → what runs in its place: graphs run without gradients, and with tensors of
other strides, as PyTorch chooses those of dimensions of size 1 by the kernel."""


@contextmanager
def _blamed(
    origins: Mapping[torch.autograd.graph.Node, fx.Node], recorder: Recorder | None
) -> Iterator[None]:
    """Inside, the operations of a node's backward are recorded with its name and source line."""
    with ExitStack() as hooks, ExitStack() as current:

        def enter(node: fx.Node) -> Any:
            def hook(_: Any) -> None:
                if recorder is not None:
                    recorder.meta = inherited(node)
                    return
                current.close()
                current.enter_context(fx_traceback.set_current_meta(node))

            return hook

        for function, node in origins.items():
            hooks.callback(function.register_prehook(enter(node)).remove)
        yield


def _strides(value: Any) -> tuple[int, ...] | None:
    return value.stride() if isinstance(value, Tensor) else None
