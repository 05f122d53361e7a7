"""Tensors that need a gradient, and that neither a model's parameters nor its inputs are.

A graph would take them for constants, and what backward adds to their ``.grad`` would be lost
without a word: a loss that adds the model's own weights, a parameter that is kept in a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.errors import InputError, TraceError


def hidden(model: nn.Module, made: Any, given: Any) -> list[Tensor]:
    """The tensors beside the parameters and inputs to which a backward gives a gradient.

    Some may be of this one run: values that were computed without gradients, and require one.

    Args:
        model: the model.
        made: what it made with gradients enabled.
        given: what it was given, in any nest.
    """
    known = {id(parameter) for parameter in model.parameters()}
    known |= {id(leaf) for leaf in pytree.tree_leaves(given)}
    return [tensor for tensor in _leaves(made) if id(tensor) not in known]


def refuse_hidden(model: nn.Module, once: Sequence[Tensor], again: Sequence[Tensor]) -> None:
    """See that no tensor outlasts a run to which both of two runs give a gradient.

    Args:
        model: the model.
        once: what ``hidden`` found in one run.
        again: the same of another run.

    Raises:
        TraceError: there is one.
    """
    for tensor in again:
        if any(tensor is other for other in once):
            raise TraceError(
                f"{type(model).__name__} reads {_told(tensor)} that requires a gradient and is no "
                "parameter of it, so that a pipeline would never give it one; register it "
                "(nn.Parameter as an attribute, nn.ParameterList for several), or detach it"
            )


def refuse_hidden_in_loss(model: nn.Module, loss: Any, given: Any) -> None:
    """See that the gradient of the loss reaches the model's output and the targets alone.

    Args:
        model: the model.
        loss: what the loss function made of ``given``.
        given: the output and the targets, in any nest, none of which has a history.

    Raises:
        InputError: there is another tensor, such as a parameter of the model.
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
    """The tensors to whose ``.grad`` a backward from there adds."""
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
