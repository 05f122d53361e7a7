"""The Plan: the model cut into stages, each an fx graph, and the edges between them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxpipe.formatting import plural, shown
from fxpipe.ir.value import HOST, Edge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from fxpipe.draw.picture import Picture
    from fxpipe.kernels.kernel import Kernel


def stash(name: str, value: Any) -> Any:
    """Graph node: send ``value`` past the next stage, straight to the stages that pop it.

    It marks the place in a stage's graph; a kernel turns it into an output. Called as it is, it
    returns its value.
    """
    return value


def pop(name: str) -> Any:
    """Graph node: the value that an earlier stage stashed under ``name``.

    It marks the place in a stage's graph; a kernel turns it into an input. It cannot be called.
    """
    raise RuntimeError(f"pop({name!r}) stands for an input; run the stage's kernel instead")


@dataclass(frozen=True)
class Argument:
    """A parameter or a buffer that a stage reads.

    Attributes:
        name: the placeholder in the stage's graph; the same as ``target`` where a leaf module
            reads it itself.
        target: the name in the model, as in its state dict.
    """

    name: str
    target: str


@dataclass(frozen=True)
class Write:
    """A buffer that a stage's forward writes, as BatchNorm does with its statistics.

    Attributes:
        target: the buffer's name in the model.
        value: the node whose value becomes the buffer's, after each micro-batch in turn; the
            same as ``target`` where a leaf module writes it itself.
    """

    target: str
    value: str


@dataclass(frozen=True)
class ValueSpec:
    """What is known of a value that crosses, on the example's micro-batch.

    Attributes:
        shape: in elements; the batch dimension is that of one micro-batch.
        dtype: the element type.
        layout: how it is stored.
        stored: the bytes of a sparse value's indices and values.
        strides: those that it was traced with; None where that is not known.
        device: the type of the device that it is on.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.layout = torch.strided
    stored: int = 0
    strides: tuple[int, ...] | None = None
    device: str = "cpu"

    @property
    def bytes(self) -> int:
        """Bytes of one micro-batch's value."""
        if self.layout is not torch.strided:
            return self.stored
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class StageCosts:
    """What a stage costs for one micro-batch of the example.

    Attributes:
        forward: seconds.
        backward: seconds.
        input_grad: seconds of the first half of backward, or None if it is not known.
        weight_grad: seconds of the second half, or None if it is not known.
        nodes: node of the traced graph → seconds of its whole backward, and of the second half.
    """

    forward: float
    backward: float
    input_grad: float | None = None
    weight_grad: float | None = None
    nodes: Mapping[str, tuple[float, float]] = field(default_factory=dict, repr=False, kw_only=True)


@dataclass(frozen=True)
class Bucket:
    """Gradients of a stage that are summed over the replicas together.

    Attributes:
        parameters: the positions of their parameters among those of the stage.
        shares: letter of a backward task → the share of its time until they are complete, from
            where the bucket before was.
    """

    parameters: tuple[int, ...]
    shares: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Stage:
    """One stage: a functional graph with ``stash`` and ``pop`` nodes, and all that it reads.

    The graph's placeholders are its parameters, its buffers and the values that arrive from the
    caller or the stage before; values from further back are ``pop`` nodes. It returns one tuple:
    the values for the next stage and the caller, in the order of their edges and each once, then
    the buffer writes.

    Attributes:
        index: its place in the pipeline, from 0.
        parameters: the parameters that it owns and reads.
        buffers: the buffers that it reads.
        writes: the buffers that it writes.
        graph: the functional graph; equality compares its text.
        leaves: whether it calls leaf modules, and so runs under autograd.
        modules: the model's submodules with work in it, for people.
        costs: measured on the example, or None.
        kernel: what runs it, once the stage is differentiated.
        buckets: its gradients in the order in which its backward completes them; empty where they
            are summed at once.
    """

    index: int
    parameters: tuple[Argument, ...]
    buffers: tuple[Argument, ...]
    writes: tuple[Write, ...]
    graph: fx.GraphModule = field(compare=False)
    leaves: bool = False
    modules: tuple[str, ...] = field(default=(), compare=False)
    costs: StageCosts | None = field(default=None, compare=False)
    kernel: Kernel | None = field(default=None, compare=False, repr=False)
    buckets: tuple[Bucket, ...] = field(default=(), compare=False, repr=False)

    @property
    def text(self) -> str:
        """The graph as text, one node a line; two stages are equal when it is."""
        from fxpipe.text.graph import print_graph

        return print_graph(self.graph.graph)

    @property
    def forward(self) -> fx.GraphModule | None:
        """The forward graph: parameters, buffers, inputs → outputs, buffer writes, saved."""
        return None if self.kernel is None else self.kernel.forward_graph

    @property
    def backward(self) -> fx.GraphModule | None:
        """The backward graph: saved, output gradients → input gradients, parameter gradients.

        None for a stage that runs under autograd, or that nothing needs a gradient of.
        """
        return None if self.kernel is None else self.kernel.backward_graph

    @property
    def input_grad(self) -> fx.GraphModule | None:
        """One half of ``backward``: saved, output gradients → input gradients, deferred.

        None also before ``part_backward``.
        """
        return None if self.kernel is None else self.kernel.input_grad_graph

    @property
    def weight_grad(self) -> fx.GraphModule | None:
        """The other half: deferred → parameter gradients. None also where there are none."""
        return None if self.kernel is None else self.kernel.weight_grad_graph

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stage):
            return NotImplemented
        return compared(self) == compared(other)

    def __hash__(self) -> int:
        return hash(compared(self))


def compared(holder: Any) -> tuple[Any, ...]:
    """What two stages, or two traced graphs, are equal by: their fields, and the graph's text."""
    return (*(getattr(holder, f.name) for f in fields(holder) if f.compare), holder.text)


@dataclass(frozen=True)
class Plan:
    """The whole model as stages and edges.

    Attributes:
        stages: in pipeline order; every edge runs forward.
        edges: what crosses, in the order in which the model makes it.
        specs: value → shape and dtype on the example's micro-batch, where known.
    """

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    specs: dict[str, ValueSpec] = field(default_factory=dict, compare=False)

    def edges_into(self, stage: int) -> tuple[Edge, ...]:
        """The edges that a stage reads, in the order of ``edges``."""
        return tuple(edge for edge in self.edges if edge.target == stage)

    def edges_from(self, stage: int) -> tuple[Edge, ...]:
        """The edges that a stage writes, in the order of ``edges``."""
        return tuple(edge for edge in self.edges if edge.source == stage)

    @property
    def buckets(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Stage → the parameters of each of its buckets of gradients."""
        return tuple(tuple([each.parameters for each in own.buckets]) for own in self.stages)

    @property
    def results(self) -> frozenset[str]:
        """The values that go to the caller."""
        return frozenset(edge.value for edge in self.edges if edge.target == HOST)

    def bytes_of(self, edge: Edge) -> int | None:
        """Bytes that cross an edge for one micro-batch of the example, where known."""
        spec = self.specs.get(edge.value)
        return None if spec is None else spec.bytes

    def __str__(self) -> str:
        """Text that ``Plan.parse`` reads back to an equal value."""
        from fxpipe.text.plan import print_plan

        return print_plan(self)

    def __repr__(self) -> str:
        return f"<Plan: {plural(len(self.stages), 'stage')}, {plural(len(self.edges), 'edge')}>"

    def _repr_mimebundle_(self, **kinds: object) -> dict[str, str]:
        """Its picture, for notebooks."""
        return shown(self, len(self.stages))

    @staticmethod
    def parse(
        text: str,
        root: torch.nn.Module | None = None,
        functions: Iterable[Callable[..., Any]] = (),
    ) -> Plan:
        """Read a plan's text. Raises ParseError with line and column.

        A plan is a program: running its graphs calls the functions and modules that it names.
        Reading it runs and imports nothing, and a text can name only what computes: PyTorch's
        operators and functions of tensors, Python's operators and math, methods and attributes of
        tensors, and the modules of ``root``. So a plan's text from elsewhere writes no file and
        starts no process, unless a module of ``root`` or one of ``functions`` does.

        Args:
            text: what ``str(plan)`` gave.
            root: the module that holds the leaf modules which the graphs call, if they call any:
                the model, or ``pipe.traced.module``, which also has a loss, and the rest of the
                model's own ``forward``, that are called as they are.
            functions: what else the graphs may call: operators of other libraries, such as
                ``torch.ops.torchvision.nms``, and functions of your own.
        """
        from fxpipe.text.plan import parse_plan

        return parse_plan(text, root, functions)

    def verify(self) -> Plan:
        """Return self, or raise VerificationError with every fault."""
        from fxpipe.verify.plan import verify_plan

        return verify_plan(self)

    def draw(self) -> Picture:
        """The plan as a picture: stages as boxes, edges with their bytes."""
        from fxpipe.draw.plan import draw_plan

        return draw_plan(self)
