"""Watch a model's own ``forward`` while it runs or is traced.

``Flow`` finds which tensors a result depends on. ``ValueChecks`` keeps a model's own checks of
values, ``assert`` or ``if`` with a ``raise``, out of its trace.

before:  if labels.max() >= self.classes: raise ValueError(…)
traced:  nothing; the rest of ``forward`` runs the line in every step
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxpipe.random.modes import Draws
from fxpipe.torchtools import source
from fxpipe.torchtools.pytrees import taken_apart


class Flow(Draws):
    """Inside, track which source tensors each value depends on."""

    def __init__(self, sources: Mapping[Any, Any]) -> None:
        """Take the sources by key; each is a tensor, or a pytree of tensors."""
        super().__init__()
        self._origins: dict[int, set[Any]] = {}
        self._held: list[Tensor] = []  # so that no other storage gets the number of one of these
        self._asked: set[Any] = set()
        for key, value in sources.items():
            for leaf in tensors_of(value):
                self._add(leaf, {key})

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and note what its results depend on."""
        origins = self._of((args, kwargs))
        result = func(*args, **kwargs)
        if origins:
            if any(not isinstance(x, Tensor | None) for x in pytree.tree_leaves(result)):
                self._asked |= origins
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for leaf in tensors_of(value):
                        self._add(leaf, origins)
            for leaf in tensors_of(result):
                self._add(leaf, origins)
        return result

    def origins(self, value: Any) -> set[Any]:
        """The keys of the sources that the value depends on, or that plain numbers came from."""
        return self._of(value) | self._asked

    def _of(self, value: Any) -> set[Any]:
        return set().union(*(self._origins.get(storage_of(x), ()) for x in tensors_of(value)))

    def _add(self, tensor: Tensor, origins: set[Any]) -> None:
        number = storage_of(tensor)
        if number not in self._origins:
            self._held.append(tensor)
        self._origins[number] = self._origins.get(number, set()) | origins


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, also in objects that it holds."""
    return [leaf for leaf in pytree.tree_leaves(taken_apart(value)) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    """A number that identifies a tensor's storage."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    strided = tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if strided else id(tensor)


_ASKS = ("__bool__", "item", "__int__", "__float__", "__index__")


class ValueChecks(TorchFunctionMode):
    """Inside, record the numbers that a model's checks of values read, or replay recorded ones.

    Attributes:
        open: whether it records or replays now.
        answers: file and line → the numbers, in order.
    """

    def __init__(self, recorded: ValueChecks | None = None) -> None:
        """Replay the ``recorded`` numbers; without them, record."""
        super().__init__()
        self.open = True
        self._answering = recorded is not None
        answers = {} if recorded is None else recorded.answers
        self.answers: dict[tuple[str, int], list[Any]] = {k: list(v) for k, v in answers.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        asks = self.open and getattr(func, "__name__", "") in _ASKS
        place = _checked() if asks else None
        if place is None:
            return func(*args, **(kwargs or {}))
        if self._answering and self.answers.get(place):
            return self.answers[place].pop(0)
        number = func(*args, **(kwargs or {}))
        self.answers.setdefault(place, []).append(number)
        return number


def _checked() -> tuple[str, int] | None:
    """The file and line of the user's code that runs now, if a check stands there."""
    frame = sys._getframe(2)
    while frame is not None and not source.is_users(frame.f_code.co_filename):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    place = frame.f_code.co_filename, frame.f_lineno
    return place if place[1] in _lines(place[0]) else None


@functools.lru_cache(maxsize=64)
def _lines(filename: str) -> frozenset[int]:
    """The lines of a file on which an ``assert``, or an ``if`` that only raises, has its test."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return frozenset()
    tests = [
        node.test
        for node in ast.walk(tree)
        if isinstance(node, ast.If | ast.Assert) and _raises(node)
    ]
    return frozenset(
        line for test in tests for line in range(test.lineno, (test.end_lineno or 0) + 1)
    )


def _raises(node: ast.If | ast.Assert) -> bool:
    if isinstance(node, ast.Assert):
        return True
    return not node.orelse and all(isinstance(each, ast.Raise) for each in node.body)
