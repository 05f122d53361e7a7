"""The Plan: the model cut into stages, each an fx graph, and the edges between the stages."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxpipe import views
from fxpipe.formatting import plural, shown
from fxpipe.ir.called import calls_in
from fxpipe.ir.value import HOST, Connected, Edge

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fxpipe.ir.schedule import Edges
    from fxpipe.kernels.kernel import Kernel


@dataclass(frozen=True)
class Argument:
    """A parameter or a buffer that a stage reads.

    Attributes:
        name: the placeholder in the stage's graph; ``target`` where a module that is called reads
            it.
        target: the name in the model, as in its state dict.
    """

    name: str
    target: str


@dataclass(frozen=True)
class Write:
    """A buffer that a stage's forward writes, as BatchNorm does with its statistics.

    Attributes:
        target: the buffer's name in the model.
        value: the node whose value becomes the buffer's, after each micro-batch in turn;
            ``target`` where a module that is called writes it.
    """

    target: str
    value: str


@dataclass(frozen=True)
class ValueSpec:
    """Shape and type of a value that crosses between stages, for a micro-batch of the example.

    Attributes:
        shape: the sizes of its dimensions.
        dtype: the type of its elements.
        strides: its strides when traced, or None if they are not known.
        device: the type of its device.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None
    device: str = "cpu"

    @cached_property
    def dense(self) -> tuple[int, ...]:
        """The strides that ``torch.empty_like`` gives: no gaps, and dimensions in the value's
        order. Its strides must be known."""
        assert self.strides is not None
        like = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        return torch.empty_like(like).stride()

    def room(self, device: torch.device) -> torch.Tensor:
        """Allocate memory for the value, with the strides ``dense``."""
        return torch.empty_strided(self.shape, self.dense, dtype=self.dtype, device=device)

    @cached_property
    def bytes(self) -> int:
        """The bytes of the value for one micro-batch."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StageCosts:
    """The seconds that a stage takes for one micro-batch of the example.

    Attributes:
        forward: the forward.
        backward: the whole backward.
        input_grad: the first half of the backward, or None if it is not known.
        weight_grad: the second half, or None if it is not known.
        nodes: node of the traced graph → its forward and backward.
    """

    forward: float
    backward: float
    input_grad: float | None = None
    weight_grad: float | None = None
    nodes: Mapping[str, float] = field(default_factory=dict, repr=False, kw_only=True)


@dataclass(frozen=True)
class Stage:
    """One stage: a functional graph, and all that it reads.

    The placeholders of the graph are the stage's parameters, its buffers, and the values from the
    caller and earlier stages. The graph returns one tuple: the values for later stages and the
    caller, in the order of their edges and each once, then the buffer writes.

    Attributes:
        index: its place in the pipeline, from 0.
        parameters: the parameters that it owns and reads.
        buffers: the buffers that it reads.
        writes: the buffers that it writes.
        graph: the functional graph; equality compares its text.
        modules: the submodules of the model that it runs, for tables and pictures.
        costs: its times on the example, if measured.
        kernel: the kernel that runs it, once the stage is differentiated.
        buckets: the positions in ``parameters`` of those whose gradients replicas sum together, in
            the order in which its backward completes them; empty where all are summed together.
    """

    index: int
    parameters: tuple[Argument, ...]
    buffers: tuple[Argument, ...]
    writes: tuple[Write, ...]
    graph: fx.GraphModule = field(compare=False)
    modules: tuple[str, ...] = field(default=(), compare=False)
    costs: StageCosts | None = field(default=None, compare=False)
    kernel: Kernel | None = field(default=None, compare=False, repr=False)
    buckets: tuple[tuple[int, ...], ...] = field(default=(), compare=False, repr=False)

    @property
    def text(self) -> str:
        """The graph as text, one node a line."""
        from fxpipe.text.plan import print_graph

        return print_graph(self.graph.graph)

    @property
    def calls(self) -> bool:
        """Whether it calls parts of the model as they are."""
        return bool(calls_in(self.graph.graph.nodes))

    @property
    def forward(self) -> fx.GraphModule | None:
        """The forward graph: parameters, buffers, inputs → outputs, buffer writes, saved."""
        return None if self.kernel is None else self.kernel.forward_graph

    @property
    def backward(self) -> fx.GraphModule | None:
        """The backward graph: saved, output gradients → input gradients, parameter gradients.

        None for a stage from which no gradient is needed.
        """
        return None if self.kernel is None else self.kernel.backward_graph

    @property
    def input_grad(self) -> fx.GraphModule | None:
        """The first half of ``backward``: saved, output gradients → input gradients, deferred.

        None also before the pass ``part_backward``.
        """
        return None if self.kernel is None else self.kernel.input_grad_graph

    @property
    def weight_grad(self) -> fx.GraphModule | None:
        """The second half: deferred → parameter gradients. None also where there are none."""
        return None if self.kernel is None else self.kernel.weight_grad_graph

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stage):
            return NotImplemented
        return compared(self) == compared(other)

    def __hash__(self) -> int:
        return hash(compared(self))


def compared(holder: Any) -> tuple[Any, ...]:
    """What decides whether two stages, or two traced graphs, are equal: fields and graph text."""
    return (*(getattr(holder, f.name) for f in fields(holder) if f.compare), holder.text)


@dataclass(frozen=True)
class Plan(Connected):
    """The whole model as stages and edges.

    Attributes:
        stages: in pipeline order; every edge runs forward.
        edges: the values that cross from forward to forward, in the order in which the model makes
            them.
        gradients: the values that cross from backward to backward, the caller's gradients
            included.
        specs: value → its shape and type for a micro-batch of the example, where known.
    """

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    gradients: tuple[Edge, ...] = ()
    specs: dict[str, ValueSpec] = field(default_factory=dict, compare=False)

    @property
    def stage_edges(self) -> Edges | None:
        """Which stages feed which, as a Schedule has them; None if each feeds the next."""
        inner = (edge for edge in self.edges if HOST not in (edge.source, edge.target))
        found = {(edge.source, edge.target) for edge in inner}
        chained = all((stage, stage + 1) in found for stage in range(len(self.stages) - 1))
        return None if chained else tuple(sorted(found))

    @property
    def buckets(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Stage → the parameters of each of its buckets of gradients."""
        return tuple([stage.buckets for stage in self.stages])

    @property
    def results(self) -> frozenset[str]:
        """The values that go to the caller."""
        return frozenset(edge.value for edge in self.edges if edge.target == HOST)

    def bytes_of(self, edge: Edge) -> int | None:
        """The bytes that cross an edge for one micro-batch of the example, if known."""
        spec = self.specs.get(edge.value)
        return None if spec is None else spec.bytes

    def __str__(self) -> str:
        """The plan as text, without shapes, costs and kernels."""
        from fxpipe.text.plan import print_plan

        return print_plan(self)

    def __repr__(self) -> str:
        return f"<Plan: {plural(len(self.stages), 'stage')}, {plural(len(self.edges), 'edge')}>"

    def _repr_mimebundle_(self, **kinds: object) -> dict[str, str]:
        return shown(self, len(self.stages))

    def verify(self) -> Plan:
        """Return self, or raise VerificationError with every fault."""
        from fxpipe.verify.plan import verify_plan

        return verify_plan(self)

    draw = views.plan_draw
