"""The whole model as one functional graph: what the front end gives to the partition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import TreeSpec

from fxpipe.ir.plan import Argument, Write, compared
from fxpipe.torchtools.moments import DeferredNorm

SEED = "fxpipe_seed"
"""The placeholder that carries a micro-batch's random seed, in graphs with random operations."""

DRAWS = "fxpipe.draws"
"""Key of a node's metadata in graphs with leaf modules: whether it draws random numbers."""

DRAWS_FROM_OTHERS = "fxpipe.draws_from_others"
"""The same: whether it draws from Python's or NumPy's global generator."""

TAKES_TURNS = "fxpipe.takes_turns"
"""Metadata of a leaf module's node: that it calls ``torch.cond`` or its like, for which PyTorch
traces, in the backward as well; that it can do in one thread at a time."""

AUTOCAST = "fxpipe.autocast"
"""Metadata of a node that is called as it is: the ``Autocasts`` under which it was, if any."""


@dataclass(frozen=True)
class Value:
    """An output of the model that the graph computes.

    Attributes:
        name: its node.
        dims: the dimensions that are the batch, () where it has none; of a number that counts
            samples (0,). None where the graph does not tell.
    """

    name: str
    dims: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Literal:
    """An output of the model that does not depend on its inputs' values, such as a number.

    Attributes:
        value: what it is for a micro-batch of the traced size.
        dims: (0,) where it counts samples, else (); None where the graph does not tell.
    """

    value: Any
    dims: tuple[int, ...] | None = ()


@dataclass(frozen=True)
class Traced:
    """A model's computation on one micro-batch, as a graph without side effects.

    The graph's placeholders are parameters, buffers, the inputs and, where the graph draws random
    numbers, SEED. It returns the tuple of its ``writes``, then its ``outputs`` that are values, and
    then the loss where that is none of these. Two are equal when their texts are.

    Attributes:
        module: the graph; equality compares its text.
        parameters: its parameter placeholders.
        buffers: its buffer placeholders, lifted constants among them.
        constants: target → tensor, of the buffers that are not the model's but lifted constants.
        inputs: for each flat input of the call the placeholder's name, or None if it is no value.
        writes: the buffers that it writes.
        outputs: the flat outputs.
        out_spec: how the outputs nest.
        leaves: whether it calls leaf modules.
        accepts: whether the graph holds for a micro-batch of that many samples.
        loss: the name of the loss value, where a loss is part of the graph.
        deferred: the calls of BatchNorm whose statistics are updated at the step's end.
    """

    module: fx.GraphModule = field(compare=False)
    parameters: tuple[Argument, ...]
    buffers: tuple[Argument, ...]
    constants: Mapping[str, torch.Tensor] = field(compare=False)
    inputs: tuple[str | None, ...]
    writes: tuple[Write, ...]
    outputs: tuple[Value | Literal, ...]
    out_spec: TreeSpec = field(compare=False)
    leaves: bool = False
    accepts: Callable[[int], bool] = field(default=lambda size: True, compare=False)
    loss: str | None = None
    deferred: tuple[DeferredNorm, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def text(self) -> str:
        """The graph as text, one node a line."""
        from fxpipe.text.graph import print_graph

        return print_graph(self.graph)

    @cached_property
    def seeded(self) -> bool:
        """Whether the graph draws random numbers, and so takes SEED."""
        return any(node.op == "placeholder" and node.name == SEED for node in self.graph.nodes)

    def state_of(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Name in the model → its parameter or buffer, or a lifted constant."""
        found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        found.update(model.named_buffers(remove_duplicate=False))
        found.update(self.constants)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Traced):
            return NotImplemented
        return compared(self) == compared(other)

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        """Text that ``Traced.parse`` reads back to an equal value."""
        from fxpipe.text.plan import print_traced

        return print_traced(self)

    @staticmethod
    def parse(
        text: str, root: nn.Module | None = None, functions: Iterable[Callable[..., Any]] = ()
    ) -> Traced:
        """Read a traced graph. Raises ParseError with line and column.

        How the outputs nest, the constants' values and the sizes that the graph holds for are no
        part of the text. What a text can name is what that of a plan can, see ``Plan.parse``.

        Args:
            text: what ``str(traced)`` gave.
            root: the module that holds the leaf modules which the graph calls, if it calls any.
            functions: what else the graph may call.
        """
        from fxpipe.text.plan import parse_traced

        return parse_traced(text, root, functions)

    def verify(self) -> Traced:
        """Return self, or raise VerificationError with every fault."""
        from fxpipe.verify.traced import verify_traced

        return verify_traced(self)


def with_dims(traced: Traced, dims: Sequence[tuple[int, ...]]) -> Traced:
    """The graph with it known of each flat output which of its dimensions are the batch."""
    if len(dims) != len(traced.outputs):
        return traced
    pairs = zip(traced.outputs, dims, strict=True)
    return replace(traced, outputs=tuple(replace(out, dims=told) for out, told in pairs))
