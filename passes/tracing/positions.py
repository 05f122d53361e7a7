"""Let models of transformers see in a trace, too, that they counted the positions themselves.

Given neither a mask nor positions, such a model counts its tokens from 0. It looks whether its
positions begin anew within a row, as those of several texts in one row do; as they do not, it lets
attention be causal without a mask. In a trace positions have no values: it then makes a mask, for
which attention has slower kernels and rounds otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from fxpipe.passes.tracing.watching import writes

_REPEATING = frozenset(("expand", "expand_as"))
_COUNTING = frozenset(
    (
        *("arange", "add", "__add__", "__radd__", "unsqueeze", "view", "__getitem__"),
        *("to", "contiguous", "clone"),
    )
)


@contextmanager
def counted_positions_known() -> Iterator[None]:
    """Inside, models of transformers take positions that they counted as those of one text a row.

    Positions that are an input of the model, or made of one, stay unknown.
    """
    masks = sys.modules.get("transformers.masking_utils")
    look = getattr(masks, "find_packed_sequence_indices", None)
    if look is None:
        yield
        return

    def found(position_ids: Tensor) -> Any:
        return None if counted.in_steps_of_one(position_ids) else look(position_ids)

    with _Counted() as counted:
        vars(masks)["find_packed_sequence_indices"] = found
        try:
            yield
        finally:
            vars(masks)["find_packed_sequence_indices"] = look


class _Counted(TorchFunctionMode):
    """Follows the values of tensors that are made of plain numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self._values = WeakIdKeyDictionary()

    def in_steps_of_one(self, positions: Tensor) -> bool:
        value = self._values.get(positions)
        with _disable_current_modes():
            return value is not None and bool((value.diff(dim=-1) == 1).all())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if writes(name, kwargs):
            self._values.clear()  # it may write into one of them, or a view of one
        elif name in _REPEATING and args[0] in self._values:
            # two rows stand for a number of rows that a trace leaves open
            sizes = [2 if isinstance(size, torch.SymInt) else size for size in made.shape]
            with _disable_current_modes():
                self._values[made] = self._values[args[0]].expand(sizes)
        elif name in _COUNTING and self._known((args, kwargs)):
            given = pytree.tree_map_only(Tensor, self._values.get, (args, kwargs))
            with _disable_current_modes():
                self._values[made] = func(*given[0], **given[1])
        return made

    def _known(self, given: Any) -> bool:
        """Whether all is a plain number, or a tensor whose values are known."""
        leaves = pytree.tree_leaves(given)
        return all(
            leaf in self._values if isinstance(leaf, Tensor) else not isinstance(leaf, torch.SymInt)
            for leaf in leaves
        )
