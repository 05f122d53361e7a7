"""Tensors that require a gradient and are neither parameters nor inputs of the model.

A graph would take them for constants, so that they would silently get no gradient. Examples are
the model's weights in a loss function, and a parameter that is kept in a plain list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.errors import InputError, TraceError


def hidden(model: nn.Module, made: Any, given: Any) -> list[Tensor]:
    """The tensors other than parameters and inputs to which a backward gives a gradient.

    Some may belong to this run only, such as ``torch.zeros(3, requires_grad=True)`` in forward.

    Args:
        model: the model.
        made: what it returned with gradients enabled.
        given: its inputs, as any pytree.
    """
    known = {id(parameter) for parameter in model.parameters()}
    known |= {id(leaf) for leaf in pytree.tree_leaves(given)}
    return [tensor for tensor in _leaves(made) if id(tensor) not in known]


def refuse_hidden(model: nn.Module, once: Sequence[Tensor], again: Sequence[Tensor]) -> None:
    """Refuse a tensor that ``hidden`` found in both of two runs: it is no value of one run.

    Args:
        model: the model.
        once: what ``hidden`` found in the first run.
        again: what it found in the second run.

    Raises:
        TraceError: there is such a tensor.
    """
    for tensor in again:
        if any(tensor is other for other in once):
            raise TraceError(
                f"{type(model).__name__} reads {_told(tensor)} that requires a gradient and is no "
                "parameter of it, so that a pipeline would never give it one; register it "
                "(nn.Parameter as an attribute, nn.ParameterList for several), or detach it"
            )


def refuse_hidden_in_loss(model: nn.Module, loss: Any, given: Any) -> None:
    """Check that the loss has gradients only to the model's output and the targets.

    Args:
        model: the model.
        loss: what the loss function returned for ``given``.
        given: the output and the targets, as any pytree of detached tensors.

    Raises:
        InputError: it has a gradient to another tensor, such as a parameter of the model.
    """
    known = {id(leaf) for leaf in pytree.tree_leaves(given)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for tensor in _leaves(loss):
        if id(tensor) in known:
            continue
        if id(tensor) in names:
            raise InputError(
                f"the loss reads the model's parameter {names[id(tensor)]!r}, to which it would "
                "give no gradient: it gets the model's output and the targets; return the loss "
                "from the model, and leave out loss=, or let the optimizer decay the weights"
            )
        raise InputError(
            f"the loss reads {_told(tensor)} that requires a gradient, which no stage would "
            "train; make it a parameter of the model, return the loss from it, and leave out "
            "loss=, or detach it"
        )


def _leaves(made: Any) -> Iterator[Tensor]:
    """The tensors to whose ``.grad`` a backward from ``made`` adds."""
    tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
    yield from (leaf for leaf in tensors if leaf.is_leaf and leaf.requires_grad)
    nodes: list[Any] = [leaf.grad_fn for leaf in tensors if leaf.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                nodes.append(parent)


def _told(tensor: Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}"
