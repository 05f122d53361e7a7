"""Find out which values of a call that are no tensors, such as strings, a model reads.

A graph holds such a value as a constant, so that another value needs another graph; not so if no
code reads it, such as the file names that a loader puts into its batches. While a model runs, an
``Unread`` stands for each value of which this is not known yet.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import cache
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor


class ReadError(Exception):
    """A value is read for which an ``Unread`` stands."""


class Unread:
    """Stands for a value. ``isinstance`` and ``is None`` see the value's class; all else that is
    done with it calls a function, and raises ``ReadError``."""

    __slots__ = ("__weakref__", "_kind", "_note")
    _kind: type
    _note: Callable[[], None]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._kind

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._kind, name):
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {name!r}")
        self._read()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if issubclass(type(value), Unread):
                value._read()
        raise ReadError(f"{function} reads a value")

    def _read(self) -> NoReturn:
        self._note()
        raise ReadError(f"a {self._kind.__name__} is read")


def unread(value: Any, note: Callable[[], None]) -> Any:
    """An ``Unread`` for a value, which calls ``note`` when it is read."""
    kind: Any = type(value)
    made = object.__new__(_class_for(kind))
    made._kind, made._note = type(value), note
    return made


@cache
def _class_for(kind: Any) -> type[Unread]:
    """A class with the methods of another, as its objects are also asked whether they have one."""

    def read(self: Unread, *others: Any, **named: Any) -> NoReturn:
        self._read()

    names = (n for n in dir(kind) if n.startswith("__") and callable(getattr(kind, n)))
    methods = {name: read for name in names if name not in _OF_ALL}
    return type("Unread", (Unread,), {"__slots__": (), **methods})


_OF_ALL = frozenset(
    f"__{name}__"
    for names in (
        ("class", "new", "init", "getattribute", "setattr", "delattr", "torch_function"),
        ("init_subclass", "subclasshook", "class_getitem"),
    )
    for name in names
)
"""Methods of every class, which do not read its objects."""


def may_be_unread(leaf: Any) -> bool:
    """Whether an ``Unread`` can stand for a leaf: not where code may ask for it by ``is``, or calls
    it."""
    return not (leaf is None or isinstance(leaf, _WHOLE) or callable(leaf))


_WHOLE = (bool, Enum, Tensor, type, torch.dtype, torch.layout, torch.device, torch.memory_format)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a number, as Python's or NumPy's, but no flag."""
    return isinstance(leaf, Real) and not isinstance(leaf, bool | Enum)


def is_constant(leaf: Any) -> bool:
    """Whether a graph can hold a leaf that is read as a constant: ``repr`` tells it from others."""
    return is_number(leaf) or type(leaf) in (str, bytes)
