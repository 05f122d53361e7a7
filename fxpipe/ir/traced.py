"""The traced model: one functional graph of the whole model, from which stages are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import TreeSpec

from fxpipe.ir.called import calls_in
from fxpipe.ir.plan import Argument, Stage, Write, compared

SEED = "fxpipe_seed"
"""The placeholder that carries a micro-batch's random seed, in graphs with random operations."""

NUMBERS = "fxpipe_numbers"
"""The argument of a model's forward that, while it is traced, takes as tensors the numbers that are
in no other one."""

DRAWS = "fxpipe.draws"
"""Metadata key of a node that calls a part of the model as it is: None if that draws no random
numbers, else the function to be called instead, with the micro-batch's seed and the node's number
after its arguments."""

AUTOCAST = "fxpipe.autocast"
"""Metadata key of a node: the ``Autocasts`` in which the model runs it, if any."""


ORIGIN = "fxpipe.origin"
"""Metadata key of a node of the backward: the node of the forward whose gradient it has a part in,
or None; in kernels, of each node's ``custom`` metadata."""

BYTES = "fxpipe.bytes"
"""Metadata key of a node of a stage's graph: the bytes of its value."""


@dataclass(frozen=True)
class DeferredNorm:
    """One call of a BatchNorm, whose running statistics are updated once per step.

    Attributes:
        moments: the name of the state in which ``gather`` accumulates its moments; zeros before
            each step.
        running_mean: the name of the running mean's buffer in the model.
        running_var: the name of the running variance's buffer.
        tracked: the name of the buffer that counts updates, if there is one.
        momentum: the weight of the new statistics.
    """

    moments: str
    running_mean: str
    running_var: str
    tracked: str | None
    momentum: float


@dataclass(frozen=True)
class Value:
    """An output of the model that the graph computes.

    Attributes:
        name: the name of its node.
        dims: its batch dimensions, () if it has none; (0,) for a number that counts samples. None
            if the graph does not tell.
    """

    name: str
    dims: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Literal:
    """An output of the model that does not depend on its inputs' values, such as a number.

    Attributes:
        value: its value for a micro-batch of the traced size.
        dims: (0,) if it counts samples, else (); None if the graph does not tell.
    """

    value: Any
    dims: tuple[int, ...] | None = ()


@dataclass(frozen=True)
class WholeBackward:
    """The backward of a traced graph, as a graph of its own.

    Its placeholders are gradients of outputs, and values of the traced graph under their names
    there. It returns one tuple: the values of ``gradients``.

    Attributes:
        graph: the graph. No name of its nodes is one of the traced graph, but for these values.
        given: output of the traced graph → the placeholder of its gradient.
        gradients: parameter or input of the traced graph → the value that is its gradient.
        lacks: why the traced graph has no gradients, if it cannot be differentiated.
    """

    graph: fx.Graph
    given: Mapping[str, str]
    gradients: Mapping[str, str]
    lacks: str = ""


@dataclass(frozen=True)
class Traced:
    """A model's computation on one micro-batch, as a graph without side effects.

    The placeholders of the graph are parameters, buffers, inputs and, if it draws random numbers,
    SEED. It returns one tuple: its ``writes``, then those of its ``outputs`` that are values, then
    the loss unless it is one of these, then the ``logged``. Two are equal when their texts are.

    Attributes:
        module: the graph; equality compares its text.
        parameters: its parameter placeholders.
        buffers: its buffer placeholders, including lifted constants.
        constants: target → tensor, for the buffers that are lifted constants.
        inputs: for each flat input of the call, its placeholder, or None if it is not a tensor that
            the graph reads.
        writes: the buffers that it writes.
        outputs: the flat outputs.
        out_spec: how the outputs nest.
        accepts: the shapes of the flat inputs → whether the graph holds for them; the shape of what
            is no tensor is None.
        loss: the name of the loss value, if a loss is part of the graph.
        logged: name → the name of the value, for numbers that the loss returns beside it.
        deferred: the calls of BatchNorm whose statistics are updated at the end of the step.
        backward: its backward; None before a backward is divided among stages.
        of: the graph for any size in which sizes were put, if it is made so.
    """

    module: fx.GraphModule = field(compare=False)
    parameters: tuple[Argument, ...]
    buffers: tuple[Argument, ...]
    constants: Mapping[str, torch.Tensor] = field(compare=False)
    inputs: tuple[str | None, ...]
    writes: tuple[Write, ...]
    outputs: tuple[Value | Literal, ...]
    out_spec: TreeSpec = field(compare=False)
    accepts: Callable[[Sequence[tuple[int, ...] | None]], bool] = field(
        default=lambda shapes: True, compare=False
    )
    loss: str | None = None
    logged: Mapping[str, str] = field(default_factory=dict)
    deferred: tuple[DeferredNorm, ...] = ()
    backward: WholeBackward | None = field(default=None, compare=False)
    of: Traced | None = field(default=None, compare=False, repr=False)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def text(self) -> str:
        """The graph as text, one node a line."""
        from fxpipe.text.plan import print_graph

        return print_graph(self.graph)

    @cached_property
    def seeded(self) -> bool:
        """Whether the graph takes SEED, since it draws random numbers."""
        return any(node.op == "placeholder" and node.name == SEED for node in self.graph.nodes)

    @property
    def calls(self) -> bool:
        """Whether it calls parts of the model as they are."""
        return bool(calls_in(self.graph.nodes))

    @property
    def saved(self) -> frozenset[str]:
        """The values, and inputs, that its backward reads."""
        if self.backward is None:
            return frozenset()
        names = {node.name for node in self.backward.graph.find_nodes(op="placeholder")}
        return frozenset(names.difference(self.backward.given.values()))

    def state_of(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Name → the model's parameter or buffer of that name, or the lifted constant."""
        state: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        state.update(model.named_buffers(remove_duplicate=False))
        state.update(self.constants)
        return state

    def touched(self, stage: Stage) -> frozenset[str]:
        """The names of the parameters and buffers that a stage reads or writes, and of the running
        statistics that its moments become at the end of a step."""
        names = {argument.target for argument in (*stage.parameters, *stage.buffers)}
        names |= {write.target for write in stage.writes}
        for norm in self.deferred:
            if norm.moments in names:
                names |= {norm.running_mean, norm.running_var}
                names |= {norm.tracked} if norm.tracked else set()
        return frozenset(names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Traced):
            return NotImplemented
        return compared(self) == compared(other)

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        """The graph as text, without the values of constants and how the outputs nest."""
        from fxpipe.text.plan import print_traced

        return print_traced(self)


def with_dims(traced: Traced, dims: Sequence[tuple[int, ...]]) -> Traced:
    """Set the batch dimensions of each flat output; without effect if there are not as many."""
    if len(dims) != len(traced.outputs):
        return traced
    pairs = zip(traced.outputs, dims, strict=True)
    return replace(traced, outputs=tuple(replace(out, dims=batch) for out, batch in pairs))
