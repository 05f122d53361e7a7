"""Trace a stage's forward and backward together into one graph.

before:  stage graph with ``stash`` and ``pop``
after:   parameters, buffers, inputs, output gradients
         → outputs, buffer writes, input gradients, parameter gradients
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.edge import Edge
from fxpipe.passes.record import NotRecorded, Recorder, record, told
from fxpipe.plan import Stage, pop, stash

ORIGIN = "fxpipe.origin"
"""Key of a traced node's ``custom`` metadata: the node of the stage's graph that it comes from."""


@dataclass(frozen=True)
class Sides:
    """What a stage's graph makes: its outputs in order, then what it writes to buffers."""

    outputs: list[Any]
    writes: list[Tensor]


@dataclass(frozen=True)
class StageSides:
    """A stage's graph as a function of parameters, buffers and inputs.

    Attributes:
        stage: the stage.
        incoming: the edges into it, which say the order of its inputs.
        returned: the values that it gives, in order, stashed ones among them.
    """

    stage: Stage
    incoming: Sequence[Edge]
    returned: Sequence[str]

    def run_forward(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], inputs: Sequence[Any]
    ) -> Sides:
        """Interpret the graph node by node."""
        return self.run(parameters, buffers, inputs)[0]

    def run(
        self,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        inputs: Sequence[Any],
        recorder: Recorder | None = None,
    ) -> tuple[Sides, dict[torch.autograd.graph.Node, fx.Node]]:
        """The same, and which autograd node comes from which node of the graph."""
        given: dict[str, Any] = {}
        given.update(zip((a.name for a in self.stage.parameters), parameters, strict=True))
        given.update(zip((a.name for a in self.stage.buffers), buffers, strict=True))
        given.update(zip((edge.value for edge in self.incoming), inputs, strict=True))
        interpreter = _StageInterpreter(self.stage.graph, given, recorder)
        order = [n.name for n in self.stage.graph.graph.nodes if n.op == "placeholder"]
        returned = interpreter.run(*(given[name] for name in order))
        if recorder is not None:
            recorder.meta = {}
        arriving = {id(tensor) for tensor in given.values()}
        outputs = [interpreter.found[name] for name in self.returned]
        outputs = [
            # a parameter that is sent on must be a value of its own, to have its own gradient
            out.view_as(out) if isinstance(out, Tensor) and id(out) in arriving else out
            for out in outputs
        ]
        writes = list(returned[len(returned) - len(self.stage.writes) :])
        return Sides(outputs, writes), interpreter.origins


class _StageInterpreter(fx.Interpreter):
    def __init__(
        self, module: fx.GraphModule, given: dict[str, Any], recorder: Recorder | None
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.given = given
        self.recorder = recorder
        self.found: dict[str, Any] = {}
        self.origins: dict[torch.autograd.graph.Node, fx.Node] = {}

    def run_node(self, n: fx.Node) -> Any:
        n.meta["custom"] = {**n.meta.get("custom", {}), ORIGIN: n.name}
        if self.recorder is not None:
            self.recorder.meta = told(n)
        if n.op == "call_function" and n.target is pop:
            value = self.given[str(n.args[0])]
        elif n.op == "call_function" and n.target is stash:
            value = self.env[n.args[1]]  # type: ignore[index]
        else:
            value = super().run_node(n)
        self.found[n.name] = value
        self._remember(n, value)
        return value

    def _remember(self, n: fx.Node, value: Any) -> None:
        """Every autograd node that is new since the last call belongs to this node."""
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


@dataclass(frozen=True)
class Joint:
    """A traced stage, forward and backward in one graph.

    Attributes:
        graph: see the text above for what it takes and returns.
        names: what its arguments are called in the stage.
        stage: the stage.
        inputs: how many inputs it takes after the parameters and buffers.
        outputs: how many outputs, then ``writes`` buffer writes, it returns first.
        writes: see ``outputs``.
        input_strides: of each input as traced; None for what is no tensor.
        gradient_outputs: which outputs get a gradient.
        gradient_strides: of each of these gradients.
        input_gradients: for each input its gradient, without data, or None.
        parameter_gradients: for each parameter whether it has a gradient.
    """

    graph: fx.Graph
    names: tuple[str, ...]
    stage: Stage
    inputs: int
    outputs: int
    writes: int
    input_strides: tuple[tuple[int, ...] | None, ...]
    gradient_outputs: tuple[int, ...]
    gradient_strides: tuple[tuple[int, ...], ...]
    input_gradients: tuple[Tensor | None, ...]
    parameter_gradients: tuple[bool, ...]


def trace_joint(
    sides: StageSides,
    parameters: list[Tensor],
    buffers: list[Tensor],
    inputs: list[Any],
    gradients: Sequence[Tensor | None],
) -> Joint:
    """Trace a stage on fake tensors; call it inside their mode.

    Args:
        sides: the stage.
        parameters: fake, with their ``requires_grad``.
        buffers: fake.
        inputs: fake tensors or numbers, in the order of the edges into the stage.
        gradients: for each output the fake gradient that it will get, or None.
    """
    given = [gradient for gradient in gradients if gradient is not None]
    has = [gradient is not None for gradient in gradients]
    sources = [*inputs, *parameters]
    asked = [isinstance(x, Tensor) and x.requires_grad for x in sources]
    found: list[Tensor | None] = []

    def joint(flat: list[Any], recorder: Recorder | None = None) -> list[Any]:
        rest = iter(flat)
        here_parameters = [next(rest) for _ in parameters]
        here_buffers = [next(rest) for _ in buffers]
        here_inputs = [next(rest) for _ in inputs]
        here_gradients = list(rest)
        with torch.enable_grad(), fx_traceback.preserve_node_meta():
            result, origins = sides.run(here_parameters, here_buffers, here_inputs, recorder)
            roots = [out for out, wanted in zip(result.outputs, has, strict=True) if wanted]
            wanted = [
                x for x, needs in zip([*here_inputs, *here_parameters], asked, strict=True) if needs
            ]
            with _blamed(origins, recorder):
                grads = (
                    torch.autograd.grad(roots, wanted, here_gradients, allow_unused=True)
                    if roots and wanted
                    else [None] * len(wanted)
                )
        values = iter(grads)
        found[:] = [next(values) if needs else None for needs in asked]
        return [*result.outputs, *result.writes, *(g for g in found if g is not None)]

    arguments = [*parameters, *buffers, *inputs, *given]
    try:
        graph = record(lambda recorder, flat: joint(flat, recorder), arguments)
    except NotRecorded:
        graph = _functional(make_fx(lambda flat: joint(flat))(arguments), arguments).graph
    _train_recurrent_layers(graph)
    count = len(inputs)
    return Joint(
        graph=graph,
        names=(
            *(argument.name for argument in (*sides.stage.parameters, *sides.stage.buffers)),
            *(edge.value for edge in sides.incoming),
            *(
                f"gradient_{name}"
                for name, wanted in zip(sides.returned, has, strict=True)
                if wanted
            ),
        ),
        stage=sides.stage,
        inputs=count,
        outputs=len(sides.returned),
        writes=len(sides.stage.writes),
        input_strides=tuple(x.stride() if isinstance(x, Tensor) else None for x in inputs),
        gradient_outputs=tuple(index for index, wanted in enumerate(has) if wanted),
        gradient_strides=tuple(gradient.stride() for gradient in given),
        input_gradients=tuple(found[:count]),
        parameter_gradients=tuple(gradient is not None for gradient in found[count:]),
    )


def _functional(module: fx.GraphModule, arguments: list[Any]) -> fx.GraphModule:
    """The graph without in-place operations, which some operations and gradients are made of.

    A graph that has them cannot be parted: what is read after a write would move before it.
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


def _train_recurrent_layers(graph: fx.Graph) -> None:
    """oneDNN's recurrent layer keeps what its backward reads only where gradients are enabled."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.mkldnn_rnn_layer.default:
            node.target = rnn_layer_with_workspace


def rnn_layer_with_workspace(*args: Any) -> Any:
    """``aten.mkldnn_rnn_layer``, ready for its backward."""
    args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


@contextmanager
def _blamed(
    origins: dict[torch.autograd.graph.Node, fx.Node], recorder: Recorder | None
) -> Iterator[None]:
    """While autograd runs, what it does for a node is recorded as that node's, with its line."""
    with ExitStack() as hooks, ExitStack() as current:

        def enter(node: fx.Node) -> Any:
            def hook(_: Any) -> None:
                if recorder is not None:
                    recorder.meta = told(node)
                    return
                current.close()
                current.enter_context(fx_traceback.set_current_meta(node))

            return hook

        for function, node in origins.items():
            hooks.callback(function.register_prehook(enter(node)).remove)
        yield


def callable_graph(
    stage: Stage, incoming: Sequence[Edge], returned: Sequence[str]
) -> fx.GraphModule:
    """A leaf stage's graph with its ``pop`` nodes as inputs and all its values returned.

    Args:
        stage: a stage with leaf modules.
        incoming: the edges into it: the order of the inputs.
        returned: the values to return, in order.
    """
    graph = fx.Graph()
    nodes = {node.name: node for node in stage.graph.graph.nodes}
    copies: dict[fx.Node, fx.Node] = {}
    for edge in incoming:
        copies[nodes[edge.value]] = graph.placeholder(edge.value)
    for node in stage.graph.graph.nodes:
        if node in copies or node.op == "output" or node.target is stash:
            continue
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[nodes[name]] for name in returned))
    graph.lint()
    return fx.GraphModule(stage.graph, graph, f"Stage{stage.index}Forward")
