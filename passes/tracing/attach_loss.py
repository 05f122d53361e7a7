"""Append the loss to the model's graph, so that it is a part of the last stage.

before:  model: (x) → conv;  loss: (output, target) → mse
after:   (x, target) → conv, mse, with the loss value mse
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxpipe.errors import InputError, TraceError
from fxpipe.ir.plan import Argument
from fxpipe.ir.traced import Traced, Value
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.passes.partition.assignment import compute_nodes
from fxpipe.torchtools.pytrees import together
from fxpipe.torchtools.sizes import evaluated, sizes

LOSS_GRAPH = "fxpipe.loss_graph"
"""Key of the loss node's metadata: a graph of the loss for analysis, which never runs, and the
input that each of its placeholders stands for, or None."""


class LossModule(nn.Module):
    """A loss as a module: ``forward(*leaves of the output, *targets)`` → scalar, or a tuple of the
    loss and the numbers beside it.

    It takes the output as flat tensors, because a graph cannot take objects of every class.
    """

    def __init__(
        self,
        loss: Callable[..., tuple[Any, Mapping[str, Any]]],
        function: Any,
        output: pytree.TreeSpec,
        logged: Sequence[str] = (),
    ) -> None:
        """Wrap ``loss(output, *targets)``, which returns the loss and the numbers ``logged`` with
        it, for an output of this pytree spec; see ``taken_apart``.

        If the user's ``function`` is a module, its buffers become buffers of this module.
        """
        super().__init__()
        self.loss = loss
        self.function = function
        self.logged = tuple(logged)
        self._output = output

    def _get_name(self) -> str:
        return "the loss"

    def forward(self, *given: Any) -> Any:  # traces and plans show this name
        count = self._output.num_leaves
        loss, logged = self.loss(together(given[:count], self._output), *given[count:])
        if logged.keys() != set(self.logged):
            raise InputError(
                f"the loss returns numbers beside it called {_listed(logged)}, and for the first "
                f"micro-batch {_listed(self.logged)}; let it return the same in every call"
            )
        return (loss, *(logged[name] for name in self.logged)) if logged else loss


def in_loss(error: BaseException | None) -> bool:
    """Whether an exception was raised while a loss ran."""
    frames = (
        frame for frame, _ in traceback.walk_tb(None if error is None else error.__traceback__)
    )
    return any(frame.f_code is LossModule.forward.__code__ for frame in frames)


def attach_loss(
    traced: Traced,
    loss: Traced,
    tensors: dict[str, torch.Tensor],
    logged: Sequence[str] = (),
    numbers: int = 0,
) -> Traced:
    """One graph that computes the model's outputs and its loss.

    Args:
        traced: the model's graph.
        loss: the graph of its LossModule, traced on the model's outputs and the targets.
        tensors: the buffers of the LossModule, by name.
        logged: the names of the scalars that it returns beside the loss.
        numbers: how many of the last inputs of both graphs are numbers, which are the same. They
            come after the targets.

    Raises:
        TraceError: the loss writes a buffer.
        InputError: the loss has parameters.
    """
    if loss.parameters:
        trained = ", ".join(argument.target for argument in loss.parameters)
        raise InputError(
            f"the loss has parameters of its own ({trained}), which no stage would train; move "
            "them into the model, return the loss from it, and leave out loss="
        )
    if loss.writes:
        raise TraceError(
            f"the loss writes its buffer {loss.writes[0].target!r}; let it only read its buffers"
        )
    returned = [out.name for out in loss.outputs if isinstance(out, Value)]
    assert len(returned) == len(loss.outputs)  # scalars, as in the trial run
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copy_nodes(traced.graph.find_nodes(op="placeholder"), graph, copies)
    placeholders = loss.graph.find_nodes(op="placeholder")
    outputs = [out.name if isinstance(out, Value) else None for out in traced.outputs]
    own, shared = _parted(traced.inputs, numbers)
    theirs_own, theirs_shared = _parted(loss.inputs, numbers)
    pairs = (*zip(theirs_own, outputs, strict=False), *zip(theirs_shared, shared, strict=True))
    passed = {a: b for a, b in pairs if a and b}
    targets = {argument.name: argument.target for argument in loss.buffers}
    buffers: list[Argument] = []
    constants = dict(traced.constants)
    for node in placeholders:
        if node.name in passed:
            continue
        target = targets.get(node.name)
        copy = graph.placeholder(node.name if target is None else f"loss_{node.name}")
        copy.meta.update(node.meta)
        copies[node] = copy
        if target is not None:
            constant = loss.constants[target] if target in loss.constants else tensors[target]
            buffers.append(Argument(copy.name, f"loss:{target}"))
            constants[f"loss:{target}"] = constant
    copy_nodes(compute_nodes(traced.graph), graph, copies)
    ours = {node.name: copy for node, copy in copies.items() if node.graph is traced.graph}
    copies.update((node, ours[passed[node.name]]) for node in placeholders if node.name in passed)
    copy_nodes(compute_nodes(loss.graph), graph, copies)
    theirs = {node.name: copy for node, copy in copies.items() if node.graph is loss.graph}
    value, *scalars = (theirs[name] for name in returned)
    names = (*(write.value for write in traced.writes), *filter(None, outputs))
    graph.output((*(ours[name] for name in names), value, *scalars))
    graph.lint()
    added = (name and theirs[name].name for name in theirs_own[len(outputs) :])
    both = (b or (a and theirs[a].name) for a, b in zip(theirs_shared, shared, strict=True))
    return replace(
        traced,
        module=lazy_module(traced.module, graph),
        buffers=(*traced.buffers, *buffers),
        constants=constants,
        inputs=(*own, *added, *both),
        accepts=_both_accept(traced, loss, numbers),
        loss=value.name,
        logged=dict(zip(logged, (node.name for node in scalars), strict=True)),
    )


def _parted(values: Sequence[Any], last: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """All values but the last ones, and these."""
    return values[: len(values) - last], values[len(values) - last :]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def _both_accept(
    traced: Traced, loss: Traced, numbers: int
) -> Callable[[Sequence[tuple[int, ...] | None]], bool]:
    """A test of whether shapes of inputs and targets are for a model's graph, and the outputs that
    it then computes for the loss."""
    values = {node.name: node.meta.get("val") for node in traced.graph.nodes}
    inputs = [sizes(values.get(name)) for name in traced.inputs]
    outputs = [sizes(values[x.name]) if isinstance(x, Value) else None for x in traced.outputs]

    def accepts(shapes: Sequence[tuple[int, ...] | None]) -> bool:
        given, shared = _parted(shapes, numbers)
        own = [*given[: len(inputs) - numbers], *shared]
        if not traced.accepts(own):
            return False
        made = evaluated(outputs, inputs, own)
        targets = given[len(inputs) - numbers :]
        return made is not None and loss.accepts([*made, *targets, *shared])

    return accepts


def declare_own_loss(traced: Traced) -> Traced:
    """The same graph, whose loss is the tensor that the model returns, or its ``.loss``."""
    return replace(traced, loss=_named_loss(traced))


def returned_loss(traced: Traced) -> str | None:
    """The name of the scalar loss that a model returns; None if it returns none."""
    name = _named_loss(traced)
    value = next((node.meta.get("val") for node in traced.graph.nodes if node.name == name), None)
    scalar = isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point()
    return name if scalar else None


def _named_loss(traced: Traced) -> str | None:
    loss = own_loss(together(traced.outputs, traced.out_spec))
    return loss.name if isinstance(loss, Value) else None


def own_loss(output: Any) -> Any:
    """The loss in a model's output: its ``loss``, or else the output itself."""
    loss = output.get("loss", output) if isinstance(output, dict) else output
    return getattr(loss, "loss", loss)


def copy_nodes(nodes: Iterable[fx.Node], graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
    """Copy nodes to a graph; ``copies`` has the copies of those that they read, and gets theirs."""
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
