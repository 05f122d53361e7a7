"""Let models of the transformers library know, in a trace, the positions that they counted.

Without a mask or positions as inputs, such a model numbers its tokens from 0. It then checks if the
positions start again within a row, as in rows packed with several texts. They do not, so attention
is causal without a mask. In a trace positions have no values, and the model would make a mask, for
which attention has slower kernels that round differently.
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
    """Inside, models of transformers know that rows with positions they counted hold one text each.

    Positions that are an input of the model, or computed from one, stay unknown.
    """
    masks = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return

    def find_packed(position_ids: Tensor) -> Any:
        return None if counted.in_steps_of_one(position_ids) else original(position_ids)

    with _Counted() as counted:
        vars(masks)["find_packed_sequence_indices"] = find_packed
        try:
            yield
        finally:
            vars(masks)["find_packed_sequence_indices"] = original


class _Counted(TorchFunctionMode):
    """Keeps the values of tensors that are computed from plain numbers alone."""

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
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if writes(name, kwargs):
            self._values.clear()  # it may write into one of them, or a view of one
        elif name in _REPEATING and args[0] in self._values:
            # two rows stand for a number of rows that a trace leaves open
            sizes = [2 if isinstance(size, torch.SymInt) else size for size in result.shape]
            with _disable_current_modes():
                self._values[result] = self._values[args[0]].expand(sizes)
        elif name in _COUNTING and self._known((args, kwargs)):
            real = pytree.tree_map_only(Tensor, self._values.get, (args, kwargs))
            with _disable_current_modes():
                self._values[result] = func(*real[0], **real[1])
        return result

    def _known(self, operands: Any) -> bool:
        """Whether every operand is a plain number, or a tensor with known values."""
        return all(
            x in self._values if isinstance(x, Tensor) else not isinstance(x, torch.SymInt)
            for x in pytree.tree_leaves(operands)
        )
