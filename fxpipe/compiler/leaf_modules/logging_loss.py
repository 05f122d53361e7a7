"""Find out whether a loss does something besides computing, which a graph would not do.

def loss(output, target):
    value = cross_entropy(output, target)
    log.append(value.item())      no graph appends, and in a trace the number is a symbol
    return value
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxpipe.compiler.leaf_modules.fallback import Leaves
from fxpipe.compiler.objective import Objective
from fxpipe.passes.tracing.loss_graph import READING
from fxpipe.torchtools import source
from fxpipe.torchtools.pytrees import taken_apart


class Readings(TorchFunctionMode):
    """Notes where code reads numbers from some tensors, or from what is computed from them.

    Attributes:
        where: the first line that does, or "".
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        super().__init__()
        self.where: str = ""
        self._made = {id(x): x for x in tensors if isinstance(x, Tensor)}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        given = pytree.tree_leaves((args, named))
        if not any(id(leaf) in self._made for leaf in given):
            return func(*args, **named)
        if func in READING and not self.where:
            frame = sys._getframe(source.users_level() - 1)
            self.where = source.of_frame(frame, frame.f_lineno)
        result = func(*args, **named)
        made = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
        self._made.update((id(leaf), leaf) for leaf in made)
        return result


def look_at_loss(
    leaves: Leaves,
    objective: Objective,
    output: Any,
    targets: Sequence[Any],
) -> None:
    """Have a loss called as it is that changes Python objects in every call, or reads numbers from
    tensors. If it raises, that is found out later."""
    loss = objective.loss
    assert loss is not None
    if leaves.loss:
        return
    flat, spec = pytree.tree_flatten(output)

    def run() -> Readings:
        given = [_copied(leaf) for leaf in flat]
        inputs = pytree.tree_unflatten(given, spec)
        parts = pytree.tree_leaves(taken_apart((inputs, targets)))
        readings = Readings(parts)
        with torch.enable_grad(), readings:
            loss(inputs, *targets)
        return readings

    try:
        before = leaves.held()
        where, changed = run().where, before.changed()
        if changed and not where:
            # what only the first run makes, such as a table, is no change
            before = leaves.held()
            run()
            changed = before.changed()
    except Exception:
        return
    if where:
        leaves.call_loss(f"reads numbers from tensors at {where}")
    elif changed:
        leaves.call_loss(f"changes {changed}")


def _copied(leaf: Any) -> Any:
    """A copy that requires a gradient if it can, and is no leaf of autograd, as in a step."""
    if not isinstance(leaf, Tensor):
        return leaf
    copy = leaf.detach().clone()
    return copy.requires_grad_() * 1 if copy.is_floating_point() else copy
