"""Find out which tensors a computation reads, while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree

from fxpipe.random.leaf_draws import Draws
from fxpipe.torchtools.pytrees import taken_apart


class Flow(Draws):
    """Inside, track which of some source tensors each value depends on."""

    def __init__(self, sources: Mapping[Any, Any]) -> None:
        """Nothing has run yet.

        Args:
            sources: key → tensor, or a pytree of tensors.
        """
        super().__init__()
        self._origins: dict[int, set[Any]] = {}
        self._held: list[Tensor] = []  # so that each storage keeps its number
        self._asked: set[Any] = set()
        for key, value in sources.items():
            for leaf in tensors_of(value):
                self._add(leaf, {key})

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation returns inside."""
        origins = self._of((args, kwargs))
        made = func(*args, **kwargs)
        if origins:
            if any(not isinstance(x, Tensor | None) for x in pytree.tree_leaves(made)):
                self._asked |= origins
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for leaf in tensors_of(value):
                        self._add(leaf, origins)
            for leaf in tensors_of(made):
                self._add(leaf, origins)
        return made

    def origins(self, value: Any) -> set[Any]:
        """The keys of the sources that a value depends on, or whose numbers were read."""
        return self._of(value) | self._asked

    def _of(self, value: Any) -> set[Any]:
        found = (self._origins.get(storage_of(leaf), ()) for leaf in tensors_of(value))
        return set().union(*found)

    def _add(self, tensor: Tensor, origins: set[Any]) -> None:
        number = storage_of(tensor)
        if number not in self._origins:
            self._held.append(tensor)
        self._origins[number] = self._origins.get(number, set()) | origins


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, including those in objects that it holds."""
    return [leaf for leaf in pytree.tree_leaves(taken_apart(value)) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    """A number that identifies a tensor's storage."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    strided = tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if strided else id(tensor)
