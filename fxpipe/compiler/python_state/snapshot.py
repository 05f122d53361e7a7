"""Take a snapshot of the plain Python state that a model's code reads, to compare it later.

The search begins at the model, its loss, the hooks of modules and the globals that the code names.
It follows attributes, entries of collections, classes, functions and their closures, as far as code
that ran reads them. It does not enter torch, nor Python's own modules and objects.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torchs
from torch.nn.parameter import is_lazy

from fxpipe.compiler.number import NumberPlace
from fxpipe.compiler.options import Options
from fxpipe.compiler.unread import is_number
from fxpipe.torchtools.state import HOOKS, OF_EACH, hooked

LONG = 1000
"""Collections with more entries are compared by identity only."""
MOST = 10_000
"""The most values that are entered, besides the tensors, hooks and classes of modules."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types whose values are compared, and have nothing in them."""
_SEQUENCES = (list, tuple, set, frozenset, deque)
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
_APART = OF_EACH - {*HOOKS}
"""Attributes of every module that are visited separately, or not at all."""
_RECORDS = ("types.SimpleNamespace", "argparse.Namespace")
"""Python's own classes whose objects are entered."""
OUTSIDE = frozenset((*sys.stdlib_module_names, "torch", "fxpipe", "mpmath", "networkx", "sympy"))
"""Packages that are not entered."""
_HOOKS, _LATE_HOOKS = map(attrgetter, ("_backward_hooks", "_post_accumulate_grad_hooks"))
MISSING = object()
"""What stands for a value that is not there."""
_ANY = object()
"""What any number is as good as."""


@dataclass
class CodeReads:
    """What code that ran reads.

    Attributes:
        names: names in the code, and its strings, which may be passed to ``getattr``.
        codes: the code objects that ran.
        variables: (id of a module's globals, name of a global that is read) → these globals.
    """

    names: set[str] = field(default_factory=set)
    codes: set[CodeType] = field(default_factory=set)
    variables: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)

    def copied(self) -> CodeReads:
        return CodeReads({*self.names}, {*self.codes}, {**self.variables})


class StateSnapshot:
    """A snapshot of the plain Python state that code reads.

    Attributes:
        values: expression, such as ``model.scale`` → its value.
        places: expression of a number → where it is, if it can be replaced there.
        reads: what the code reads.
        modules: the model's modules.
        parameters: the model's parameters.
        dense: the parameters that have strides.
    """

    def __init__(
        self,
        reads: CodeReads,
        options: Options,
        leaves: Iterable[str],
        free: Collection[str] = (),
        passing: Collection[tuple[str, str]] = (),
    ) -> None:
        """Take the snapshot of the model and its loss, without entering leaf modules. The numbers
        that the expressions ``free`` stand for may be any, and so may the attributes ``passing`` of
        modules, by their names."""
        self.values: dict[str, Any] = {}
        self.places: dict[str, NumberPlace] = {}
        self._free = free
        self._passing: dict[str, set[str]] = {}
        for at, name in passing:
            path = f"model.{at}" if at else "model"
            self._passing.setdefault(path, set()).add(name)
        self.modules = [*options.model.modules()]
        self.parameters = [*options.model.parameters()]
        shaped = (each for each in self.parameters if not is_lazy(each))
        self.dense = [each for each in shaped if each.layout is torch.strided]
        # (a dictionary, its length or None if that does not matter, the items that matter)
        self._dicts: list[tuple[Mapping[Any, Any], int | None, list[tuple[Any, Any]]]] = []
        self._lists: list[tuple[Any, list[Any]]] = []  # (a collection, a copy of it as a list)
        self._cells: list[tuple[CellType, Any]] = []  # (a variable of a closure, its value)
        self.reads = reads
        self._first: dict[int, str] = {}  # id → the first expression for the object
        self._rest: deque[tuple[str, Any]] = deque()  # expressions and values to enter
        self._module("model", options.model, leaves)
        for name in _GLOBAL_HOOKS:
            self._at(f"torch.nn.modules.module.{name}", getattr(torchs, name))
        self._at("loss", options.loss)
        used: dict[int, tuple[dict[str, Any], None, list[tuple[str, Any]]]] = {}
        for (number, name), module in reads.variables.items():
            value = module.get(name, MISSING)
            path = f"{module.get('__name__')}.{name}"
            seen = self._at(path, value, NumberPlace(module, name))
            used.setdefault(number, (module, None, []))[2].append((name, seen))
        self._dicts += used.values()
        left = len(self.values) + MOST
        while self._rest:
            path, value = self._rest.popleft()
            if len(self.values) < left:
                self._into(path, value)
            else:
                self.values[path] = Identity(value)
        self._first.clear()

    def holds(self) -> bool:
        """Whether everything is as it was. This is a quick test: an equal list that replaces
        another one counts as a change."""
        for held, length, items in self._dicts:
            if length is not None and len(held) != length:
                return False
            for name, value in items:
                new = held.get(name, MISSING)
                if new is not value and _differ(new, value):
                    return False
        for collection, copy in self._lists:
            if len(collection) != len(copy):
                return False
            for new, value in zip(collection, copy, strict=True):
                if new is not value and _differ(new, value):
                    return False
        for cell, value in self._cells:
            new = cell_content(cell)
            if new is not value and _differ(new, value):
                return False
        return not (any(map(_HOOKS, self.parameters)) or any(map(_LATE_HOOKS, self.parameters)))

    def _at(self, path: str, value: Any, place: NumberPlace | None = None) -> Any:
        """Note the value of an expression, and where it is. Its content is visited later. Returns
        what ``holds`` compares with."""
        while path in self.values:
            path += "'"
        if is_number(value) and place is not None:
            self.places[path] = place
            if path in self._free:
                self.values[path] = _ANY
                return _ANY
        if isinstance(value, PLAIN):
            self.values[path] = type(value), value
            return value
        first = self._first.setdefault(id(value), path)
        if first is path:  # else its content is noted under the first expression
            self._rest.append((path, value))
            self.values[path] = first, _kind(value)
        else:
            self.values[path] = first
        return value

    def _into(self, path: str, value: Any) -> None:
        """Visit the content of a value."""
        if isinstance(value, _SEQUENCES):
            if len(value) <= LONG:
                written = isinstance(value, list)
                content = [
                    self._at(
                        f"{path}[{index}]", item, NumberPlace(value, index) if written else None
                    )
                    for index, item in enumerate([*value])
                ]
                self._lists.append((value, content))
        elif _is_dict(value):
            if len(value) <= LONG:
                entries = []
                for key, item in [*value.items()]:
                    name = f"{path}[{key!r}]" if isinstance(key, PLAIN) else f"{path}[?]"
                    entries.append((key, self._at(name, item, NumberPlace(value, key))))
                self._dicts.append((value, len(value), entries))
        elif isinstance(value, nn.Module):
            self._module(path, value)
        elif isinstance(value, FunctionType):
            self._function(path, value)
        elif isinstance(value, MethodType):
            self._at(f"{path}.__self__", value.__self__)
            self._at(f"{path}.__func__", value.__func__)
        elif isinstance(value, partial):
            self._at(f"{path}.func", value.func)
            self._at(f"{path}.args", value.args)
            self._at(f"{path}.keywords", value.keywords)
        elif isinstance(value, type):
            for base in value.__mro__:
                if top(base.__module__) not in OUTSIDE:
                    self._attributes(path, vars(base))
        elif isinstance(value, ModuleType):
            if top(value.__name__) not in OUTSIDE:
                self._attributes(path, vars(value))
        elif _is_record(type(value)):
            self._attributes(path, getattr(value, "__dict__", {}))
            self._at(f"{path}.__class__", type(value))

    def _module(self, path: str, root: nn.Module, leaves: Iterable[str] | None = None) -> None:
        """Visit a module with its submodules. If ``leaves`` is None it is not the model, and graphs
        hold its parameters and buffers as constants."""
        modules = [(f"{path}.{name}" if name else path, m) for name, m in root.named_modules()]
        self._first.update((id(module), where) for where, module in modules)
        if leaves is not None:  # a tensor is noted under its name in the model
            for where, module in modules:
                for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                    if tensor is not None:
                        self._first.setdefault(id(tensor), f"{where}.{name}")
        without = [f"{path}.{leaf}" for leaf in leaves or ()]
        # ``Guard.state`` has the modes of the model's own modules
        but = _APART if leaves is not None else _APART - {"training"}
        for where, module in modules:
            for held in (module._modules, module._parameters, module._buffers):
                self._dicts.append((held, len(held), [*held.items()]))
            if where in without:
                self.values[where] = Identity(module)
            if any(where == leaf or where.startswith(f"{leaf}.") for leaf in without):
                continue
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                self.values[f"{where}.{name}"] = (
                    Identity(tensor) if leaves is None else _form(tensor)
                )
            self._attributes(where, vars(module), but | self._passing.get(where, set()))
            self._at(f"{where}.__class__", type(module))

    def _function(self, path: str, function: FunctionType) -> None:
        """Visit the defaults and the closure of a function that ran."""
        if function.__code__ in self.reads.codes:
            self._at(f"{path}.__defaults__", function.__defaults__)
            self._at(f"{path}.__kwdefaults__", function.__kwdefaults__)
            names, cells = function.__code__.co_freevars, function.__closure__ or ()
            for name, cell in zip(names, cells, strict=True):
                seen = self._at(f"{path}.{name}", cell_content(cell), NumberPlace(cell, None))
                self._cells.append((cell, seen))

    def _attributes(self, path: str, held: Mapping[str, Any], but: Collection[str] = ()) -> None:
        names = self.reads.names
        own = isinstance(held, dict)  # that of a class cannot be written
        items = [
            (name, self._at(f"{path}.{name}", value, NumberPlace(held, name) if own else None))
            for name, value in [*held.items()]
            if name in names and name not in but
        ]
        self._dicts.append((held, len(held), items))


@dataclass(frozen=True, eq=False)
class Identity:
    """Compares an object by identity: equal only to an ``Identity`` of the same object."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _kind(value: Any) -> Any:
    """What to compare of a value itself; its content is noted separately."""
    if isinstance(value, _SEQUENCES) and len(value) <= LONG:
        return type(value), len(value)
    if _is_dict(value) and len(value) <= LONG:  # copied, as another thread may change it
        keys = [(type(k), k) if isinstance(k, PLAIN) else Identity(k) for k in list(value)]
        return type(value), keys
    if isinstance(value, FunctionType):
        return value.__code__, Identity(value.__globals__)
    if isinstance(value, nn.Module | MethodType | partial):
        return type(value)
    if isinstance(value, ReferenceType) and isinstance(value(), Tensor):
        return type(value)  # an LSTM refers to its parameters anew whenever one is set
    return Identity(value)


def _form(tensor: Tensor | None) -> Any:
    """The properties of a parameter or buffer that a graph depends on."""
    if tensor is None:
        return None
    if is_lazy(tensor):
        return Identity(tensor)  # a lazy parameter has no shape before the model has run
    hooks = isinstance(tensor, nn.Parameter) and hooked(tensor)
    return tensor.shape, tensor.dtype, tensor.layout, hooks


def _differ(new: Any, old: Any) -> bool:
    """Whether two different objects are not equal plain values of one type."""
    if old is _ANY:
        return not is_number(new)
    return not (isinstance(old, PLAIN) and type(new) is type(old) and new == old)


def cell_content(cell: CellType) -> Any:
    """The value of a variable of a closure, or MISSING if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def top(name: Any) -> str:
    """The package of a dotted name."""
    return str(name).partition(".")[0]


def _is_dict(value: Any) -> bool:
    """Whether a value behaves like a dictionary."""
    return isinstance(value, dict) and type(value).get is dict.get


def _is_record(cls: type) -> bool:
    """Whether a class's objects have attributes to visit, such as a model's configuration."""
    users = top(cls.__module__) not in OUTSIDE
    return users or f"{cls.__module__}.{cls.__qualname__}" in _RECORDS
