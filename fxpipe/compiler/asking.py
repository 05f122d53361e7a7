"""Find the tensors whose values become plain numbers while a model runs, as by ``float(self.t)``.

A graph reads tensors from their own memory in every step, but such a number stays in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from fxpipe.random.leaf_draws import Draws

aten = torch.ops.aten

_NUMBERS = frozenset((aten._local_scalar_dense.default, aten.equal.default))
"""What gives a number or a flag, also where an operation takes a tensor for a number."""
_LISTS = ("tolist", "numpy", "__array__", "__repr__", "__format__")
"""What gives values and is no operation."""


@contextmanager
def asks_noted(asked: dict[int, Tensor], here: Callable[[], bool]) -> Iterator[None]:
    """Inside, note the tensors that are asked for their values, by their identities; but none that
    an operation has made inside, and none where ``here()`` is false."""
    made = WeakIdKeyDictionary()

    def note(values: Any) -> None:
        for each in pytree.tree_leaves(values):
            if isinstance(each, Tensor) and each not in made and here():
                asked[id(each)] = each

    with _Lists(note), _Numbers(note, made):
        yield


class _Numbers(Draws):
    def __init__(self, note: Callable[[Any], None], made: WeakIdKeyDictionary) -> None:
        super().__init__()
        self._note = note
        self._made = made

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation returns inside."""
        if func in _NUMBERS:
            self._note(args)
        made = func(*args, **kwargs)
        given = {id(each) for each in pytree.tree_leaves((args, kwargs))}
        for each in pytree.tree_leaves(made):
            if isinstance(each, Tensor) and id(each) not in given:
                self._made[each] = None
        return made


class _Lists(TorchFunctionMode):
    def __init__(self, note: Callable[[Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _LISTS:
            self._note(args[:1])
        return func(*args, **(kwargs or {}))
