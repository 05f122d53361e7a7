"""The Python objects that a function reaches, as they are now, and put back later.

loss = meter.loss                   a bound method
meter.seen, meter.average = 3, 0.1  attributes of its object
log = [tensor(1.7)]                 a global that its code names

Trial runs of a loss that logs would otherwise leave entries behind that no step has made.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from functools import partial
from queue import Queue, SimpleQueue
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxpipe.compiler.python_state.snapshot import (
    LONG,
    MISSING,
    MOST,
    OUTSIDE,
    PLAIN,
    cell_content,
    top,
)
from fxpipe.torchtools import source
from fxpipe.torchtools.pytrees import size_in_bytes

_BYTES = 1 << 26
"""The most bytes of tensors that are kept."""
_RUNNING = (threading.Thread, type(threading.Lock()), type(threading.RLock()), Queue, SimpleQueue)
"""What an object has that other threads use, which is left alone."""


class _Kept(NamedTuple):
    """Something that is kept: an expression for it, whether it is as it was, what makes it so."""

    name: str
    same: Callable[[], bool]
    put_back: Callable[[], object]


class Held:
    """What a function reaches: the variables of closures and the globals that its code names, and
    the attributes, entries and tensors, but for parameters, of the objects there. Not entered are
    functions of installed packages, objects of PyTorch and of Python's own modules, and those that
    other threads use. Of a longer list than ``LONG`` only the length is kept."""

    def __init__(self, function: Any, name: str, without: Iterable[object] = ()) -> None:
        """Keep what ``function`` reaches now, ``without`` these objects."""
        self._kept: list[_Kept] = []
        self._left = _BYTES
        seen: dict[int, object] = {id(each): each for each in without}
        todo: deque[tuple[str, Any]] = deque([(name, function)])
        while todo and len(seen) < MOST:
            where, value = todo.popleft()
            if id(value) not in seen:
                seen[id(value)] = value  # kept alive, so that its id stays its own
                with suppress(Exception):  # of code of its own, or as another thread changes it
                    todo.extend(self._enter(where, value))

    def changed(self) -> str:
        """The first of these that is not as it was; empty if all are."""
        return next((kept.name for kept in self._kept if not kept.same()), "")

    def put_back(self) -> None:
        """Make all as it was."""
        for kept in self._kept:
            if not kept.same():
                kept.put_back()

    def _enter(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Keep the content of a value; the objects in it, each with its expression."""
        match value:
            case Tensor() if not isinstance(value, nn.Parameter):
                self._tensor(name, value)
            case FunctionType() if _is_own(value.__code__.co_filename, value.__module__):
                yield from self._function(value)
            case MethodType():
                yield name.removesuffix(f".{value.__name__}"), value.__self__
                yield name, value.__func__
            case partial():
                yield from ((name, each) for each in (value.func, value.args, value.keywords))
            case tuple() | frozenset():
                yield from ((f"{name}[{i}]", each) for i, each in enumerate(value))
            case list() if len(value) > LONG:
                long = len(value)
                self._note(name, lambda: len(value) <= long, lambda: _fill(value, value[:long]))
            case list() | deque() if len(value) <= LONG:
                items = [*value]
                self._note(
                    name,
                    lambda: len(value) == len(items) and all(map(_alike, value, items)),
                    lambda: _fill(value, items),
                )
                yield from ((f"{name}[{i}]", each) for i, each in enumerate(items))
            case set() if len(value) <= LONG:
                members = {*value}
                self._note(name, lambda: bool(value == members), lambda: _fill(value, members))
            case dict() if len(value) <= LONG:
                yield from self._items(f"{_escaped(name)}[{{!r}}]", value, [*value], whole=True)
            case nn.Module() | object(__dict__=dict()) if _is_entered(value):
                form = f"{_escaped(name)}.{{}}"
                yield from self._items(form, vars(value), [*vars(value)], whole=True)

    def _function(self, function: FunctionType) -> Iterator[tuple[str, Any]]:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if (content := cell_content(cell)) is not MISSING:
                self._cell(name, cell, content)
                yield name, content
        yield from ((code.co_name, each) for each in function.__defaults__ or ())
        names = {name for each in _codes(code) for name in each.co_names}
        own = function.__globals__
        yield from self._items("{}", own, [n for n in names if n in own])
        for module in [own[n] for n in names if isinstance(own.get(n), ModuleType)]:
            if _is_own(getattr(module, "__file__", None) or "", module.__name__):
                there = [n for n in names if n in vars(module)]
                yield from self._items(f"{module.__name__}.{{}}", vars(module), there)

    def _items(
        self, form: str, held: MutableMapping[Any, Any], keys: list[Any], *, whole: bool = False
    ) -> Iterator[tuple[str, Any]]:
        """Keep these entries of a mapping; if it is kept as a whole, there are to be no others."""
        before = {key: held[key] for key in keys}
        if whole:
            name = form.format("…")
            self._note(name, lambda: held.keys() <= before.keys(), lambda: _drop(held, before))
        for key, value in before.items():
            self._entry(name := form.format(key), held, key, value)
            if type(value) not in PLAIN:
                yield name, value

    def _entry(self, name: str, held: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        self._note(
            name,
            lambda: _alike(held.get(key, MISSING), value),
            lambda: held.__setitem__(key, value),
        )

    def _cell(self, name: str, cell: Any, content: Any) -> None:
        self._note(
            name,
            lambda: _alike(cell_content(cell), content),
            lambda: setattr(cell, "cell_contents", content),
        )

    def _tensor(self, name: str, tensor: Tensor) -> None:
        size = size_in_bytes(tensor)
        if tensor.is_meta or tensor.is_inference() or size > self._left:
            return
        self._left -= size
        version, before = tensor._version, tensor.detach().clone()
        self._note(name, lambda: tensor._version == version, lambda: _write(tensor, before))

    def _note(self, name: str, same: Callable[[], bool], put_back: Callable[[], object]) -> None:
        self._kept.append(_Kept(name, same, put_back))


def _is_own(file: str, module: object) -> bool:
    """Whether code belongs to the user, and not to an installed package."""
    return top(module) not in OUTSIDE and "-packages" not in file and source.is_users(file)


def _is_entered(value: Any) -> bool:
    """Whether an object's attributes are kept."""
    if isinstance(value, nn.Module):
        return top(type(value).__module__) != "fxpipe"
    if isinstance(value, type | ModuleType) or top(type(value).__module__) in OUTSIDE:
        return False
    return not any(isinstance(each, _RUNNING) for each in vars(value).values())


def _codes(code: Any) -> Iterator[Any]:
    """A code object, and those inside of it."""
    yield code
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _codes(constant)


def _escaped(name: str) -> str:
    """The name in a form: with the braces that a key in it has."""
    return name.replace("{", "{{").replace("}", "}}")


def _alike(new: Any, old: Any) -> bool:
    return new is old or (type(old) in PLAIN and type(new) is type(old) and bool(new == old))


def _drop(held: MutableMapping[Any, Any], before: Mapping[Any, Any]) -> None:
    """Drop the entries that were not there before."""
    for key in [key for key in held if key not in before]:
        del held[key]


def _fill(value: Any, items: Any) -> None:
    """Let a list, deque or set have these items."""
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(items)


def _write(tensor: Tensor, before: Tensor) -> None:
    with torch.no_grad():
        if tensor.shape != before.shape:
            tensor.resize_(before.shape)
        tensor.copy_(before)
