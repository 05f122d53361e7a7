"""Inputs and results of leaf modules, taken apart into their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe.errors import TraceError


class UnfitLeaf(TraceError):
    """A submodule that cannot be a leaf module; one around it may be.

    Attributes:
        name: the submodule's name.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"leaf module {name!r} {why}")
        self.name = name


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Nest:
    """A pytree without its tensors.

    Attributes:
        leaves: its leaves; None in place of a tensor.
        places: for each leaf whether it is a tensor.
        spec: how they nest.
    """

    leaves: list[Any]
    places: list[bool]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, value: Any) -> Nest:
        """That of a value."""
        leaves, spec = pytree.tree_flatten(value)
        places = [isinstance(x, Tensor) for x in leaves]
        return cls(
            [None if has else x for x, has in zip(leaves, places, strict=True)], places, spec
        )

    @property
    def tensors(self) -> int:
        """The number of its tensors."""
        return sum(self.places)

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The value with these tensors."""
        rest = iter(tensors)
        pairs = zip(self.leaves, self.places, strict=True)
        return pytree.tree_unflatten([next(rest) if has else x for x, has in pairs], self.spec)

    def can_be_given(self, recorded: Nest) -> bool:
        """Whether a step can call a leaf module with the inputs that it got while it was traced.

        They may differ from the recorded ones, for example by a mask that is left out. But an
        object that hides tensors of the trace would be wrong in every step.
        """
        if all(isinstance(x, _PLAIN) or any(x is y for y in recorded.leaves) for x in self.leaves):
            return True
        symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
        if any(isinstance(x, symbols) for x in self.leaves):
            return False
        same = self.places == recorded.places and self.spec == recorded.spec
        return same and bool(self.leaves == recorded.leaves)
