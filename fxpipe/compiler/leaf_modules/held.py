"""The Python objects that a function reaches, as they are now, and put back later.

loss = meter.loss                   a bound method
meter.seen, meter.average = 3, 0.1  attributes of its object
log = [tensor(1.7)]                 a global that its code names

Trial runs of a loss that logs would otherwise leave entries behind that no step has made.
"""

from __future__ import annotations

import sys
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

from fxpipe.torchtools import source
from fxpipe.torchtools.pytrees import size_in_bytes

_MOST = 10_000
"""The most objects that are entered."""
_LONG = 1000
"""Of a longer list only the length is kept; a longer dictionary or set is not entered."""
_BYTES = 1 << 26
"""The most bytes of tensors that are kept."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_RUNNING = (threading.Thread, type(threading.Lock()), type(threading.RLock()), Queue, SimpleQueue)
"""What an object has that other threads use, which is left alone."""
_OUTSIDE = frozenset((*sys.stdlib_module_names, "torch", "fxpipe"))
_MISSING = object()


class _Kept(NamedTuple):
    """Something that is kept.

    Attributes:
        name: an expression for it.
        same: whether it is as it was.
        put_back: makes it so.
    """

    name: str
    same: Callable[[], bool]
    put_back: Callable[[], None]


class Held:
    """What a function reaches: the variables of closures and the globals that its code names, and
    the attributes, entries and tensors, but for parameters, of the objects there. Not entered are
    functions of installed packages, objects of PyTorch and of Python's own modules, and those that
    other threads use."""

    def __init__(self, function: Any, name: str, without: Iterable[object] = ()) -> None:
        """Keep what ``function`` reaches now, ``without`` these objects."""
        self._kept: list[_Kept] = []
        self._left = _BYTES
        seen: dict[int, object] = {id(each): each for each in without}
        todo: deque[tuple[str, Any]] = deque([(name, function)])
        while todo and len(seen) < _MOST:
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
            case list() | deque():
                yield from self._list(name, value)
            case set() if len(value) <= _LONG:
                self._note(name, value, {*value}, set.__eq__, _fill_set)
            case dict() if len(value) <= _LONG:
                yield from self._items(f"{_escaped(name)}[{{!r}}]", value, [*value], whole=True)
            case nn.Module() | object(__dict__=dict()) if _is_entered(value):
                form = f"{_escaped(name)}.{{}}"
                yield from self._items(form, vars(value), [*vars(value)], whole=True)

    def _function(self, function: FunctionType) -> Iterator[tuple[str, Any]]:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            content = _content(cell)
            self._note(name, cell, content, _is_content, _fill_cell)
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
            self._note(form.format("…"), held, before, _has_keys, _drop_others)
        for key, value in before.items():
            name = form.format(key)
            entry = (held, key)
            self._note(name, entry, value, _is_entry, _fill_entry)
            if type(value) not in _PLAIN:
                yield name, value

    def _list(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if len(value) > _LONG:
            self._note(name, value, len(value), lambda x, n: len(x) <= n, _shorten)
            return
        content = [*value]
        self._note(name, value, content, _has_content, _fill_list)
        yield from ((f"{name}[{i}]", each) for i, each in enumerate(content))

    def _tensor(self, name: str, tensor: Tensor) -> None:
        size = size_in_bytes(tensor)
        if tensor.is_meta or tensor.is_inference() or size > self._left:
            return
        self._left -= size
        version, before = tensor._version, tensor.detach().clone()
        self._note(name, tensor, (version, before), _is_version, _fill_tensor)

    def _note(
        self,
        name: str,
        where: Any,
        before: Any,
        same: Callable[[Any, Any], bool],
        fill: Callable[[Any, Any], None],
    ) -> None:
        self._kept.append(_Kept(name, partial(same, where, before), partial(fill, where, before)))


def _is_own(file: str, module: object) -> bool:
    """Whether code belongs to the user, and not to an installed package."""
    return _top(module) not in _OUTSIDE and "-packages" not in file and source.is_users(file)


def _is_entered(value: Any) -> bool:
    """Whether an object's attributes are kept."""
    if isinstance(value, nn.Module):
        return _top(type(value).__module__) != "fxpipe"
    if isinstance(value, type | ModuleType) or _top(type(value).__module__) in _OUTSIDE:
        return False
    return not any(isinstance(each, _RUNNING) for each in vars(value).values())


def _codes(code: Any) -> Iterator[Any]:
    """A code object, and those inside of it."""
    yield code
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _codes(constant)


def _top(module: object) -> str:
    return str(module).partition(".")[0]


def _escaped(name: str) -> str:
    """The name in a form: with the braces that a key in it has."""
    return name.replace("{", "{{").replace("}", "}}")


def _alike(new: Any, old: Any) -> bool:
    return new is old or (type(old) in _PLAIN and type(new) is type(old) and bool(new == old))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return _MISSING


def _is_content(cell: Any, before: Any) -> bool:
    return _alike(_content(cell), before)


def _fill_cell(cell: Any, before: Any) -> None:
    if before is _MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = before


def _has_keys(held: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    return held.keys() <= before.keys()


def _drop_others(held: MutableMapping[Any, Any], before: Mapping[Any, Any]) -> None:
    for key in [key for key in held if key not in before]:
        del held[key]


def _is_entry(entry: tuple[Mapping[Any, Any], Any], before: Any) -> bool:
    held, key = entry
    return _alike(held.get(key, _MISSING), before)


def _fill_entry(entry: tuple[MutableMapping[Any, Any], Any], before: Any) -> None:
    held, key = entry
    held[key] = before


def _has_content(value: Any, before: list[Any]) -> bool:
    return len(value) == len(before) and all(map(_alike, value, before))


def _fill_list(value: Any, before: list[Any]) -> None:
    value.clear()
    value.extend(before)


def _shorten(value: Any, length: int) -> None:
    while len(value) > length:
        value.pop()


def _fill_set(value: set[Any], before: set[Any]) -> None:
    value.clear()
    value.update(before)


def _is_version(tensor: Tensor, before: tuple[int, Tensor]) -> bool:
    return tensor._version == before[0]


def _fill_tensor(tensor: Tensor, before: tuple[int, Tensor]) -> None:
    with torch.no_grad():
        if tensor.shape != before[1].shape:
            tensor.resize_(before[1].shape)
        tensor.copy_(before[1])
