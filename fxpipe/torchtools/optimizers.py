"""Copies of an optimizer with other parameter groups, to be stepped in its place, and several
optimizers as one."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree


class Several(Optimizer):
    """Several optimizers as one, which has all their groups, one after another.

    It shares the groups with them, but not the state: ``hand_back`` gives them theirs.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the groups and the state of optimizers over different parameters."""
        super().__init__([{"params": []}], {})
        self.param_groups = [group for each in optimizers for group in each.param_groups]
        for each in optimizers:
            self.state.update((p, kept) for p, kept in each.state.items())
        self._ends = tuple(accumulate(len(each.param_groups) for each in optimizers))
        self._parts = tuple(copy_alone(each, []) for each in optimizers)
        self._given = tuple(map(weakref.ref, optimizers))

    @property
    def given(self) -> list[Optimizer]:
        """Those of the optimizers that somebody still has."""
        return [optimizer for each in self._given if (optimizer := each()) is not None]

    def step(self, closure: Any = None) -> Any:
        """Have each of them update its parameters. Returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.alone():
            if any(group["params"] for group in part.param_groups):
                type(part).step(part)
        return loss

    def hand_back(self) -> None:
        """Give the optimizers the state of their parameters."""
        for optimizer in self.given:
            own = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.state.update((p, self.state[p]) for p in own if p in self.state)

    def alone(self) -> Iterator[Any]:
        """A copy of each of them, with its groups and the state of all."""
        start = 0
        for part, end in zip(self._parts, self._ends, strict=True):
            part.param_groups, part.state = self.param_groups[start:end], self.state
            yield part
            start = end

    def __getstate__(self) -> dict[str, Any]:
        own = ("_ends", "_parts", "_given")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = state["param_groups"]
        if (mine := vars(self).get("param_groups")) is not None:  # they are the others' groups, too
            for group, loaded in zip(mine, groups, strict=True):
                group.clear()
                group.update(loaded)
            groups = mine
        super().__setstate__({**state, "param_groups": groups})


def class_of(optimizer: Optimizer) -> str:
    """The name of an optimizer's class, or of the classes of several."""
    return ", ".join(type(part).__qualname__ for part in parts_of(optimizer))


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that several are, or the only one."""
    return optimizer._parts if isinstance(optimizer, Several) else (optimizer,)


def with_given(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, and those that it was made of."""
    return [optimizer, *(optimizer.given if isinstance(optimizer, Several) else ())]


def twin(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Any:
    """Copy an optimizer with other parameter groups; the copy shares its state and attributes.

    Step it with ``type(optimizer).step``, as the attribute ``step`` may be a scheduler's wrapper.
    """
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(vars(optimizer))
    copy.__dict__.pop("step", None)
    copy.param_groups = list(groups)
    return copy


def copy_alone(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Any:
    """Copy an optimizer with other parameter groups, an empty state and no hooks. The copy shares
    nothing with the optimizer that a step may change in place."""
    copy = twin(optimizer, groups)
    for key, value in [*vars(copy).items()]:
        if key.startswith("_optimizer_") and key.endswith("_hooks"):
            vars(copy)[key] = OrderedDict()
        elif key not in ("param_groups", "state"):
            vars(copy)[key] = pytree.tree_map_only((Tensor, Optimizer), _unshared, value)
    copy.state = defaultdict(dict)
    return copy


def _unshared(value: Any) -> Any:
    if isinstance(value, Optimizer):
        return copy_alone(value, [])
    return value if isinstance(value, nn.Parameter) else value.detach().clone()
