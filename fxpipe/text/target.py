"""The functions that a graph's text may name, and their names. Naming one never runs anything.

There is no import and no attribute access to arbitrary objects: a name is looked up in fixed
modules, and what is found there must be a function or an operator. A graph that was parsed is a
program, though: running it runs the functions that it names.
"""

from __future__ import annotations

import functools
import keyword
import math
import operator
import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _OpNamespace

import fxpipe.random
from fxpipe.errors import near
from fxpipe.plan import pop, stash
from fxpipe.text.path import Path, print_path

Function = Callable[..., Any]

BARE: dict[str, Function] = {
    function.__name__: function
    for function in (
        *(stash, pop),
        *(abs, bool, divmod, float, getattr, int, isinstance, len),
        *(list, max, min, pow, round, sum, tuple),
    )
}
"""The functions that are written without a module."""

_MODULES: dict[str, tuple[types.ModuleType, tuple[str, ...]]] = {
    "operator": (operator, ("_operator", "operator")),
    "math": (math, ("math",)),
    "torch": (torch, ("torch",)),
    "torch.nn.functional": (torch.nn.functional, ("torch",)),
    "torch.linalg": (torch.linalg, ("torch",)),
    "torch.fft": (torch.fft, ("torch",)),
    "torch.special": (torch.special, ("torch",)),
    "torch._C._nn": (torch._C._nn, ("torch",)),
    "fxpipe.random": (fxpipe.random, ("fxpipe",)),
}
"""Name of a module → the module, and the packages whose functions it may hold."""

CALL_FORM = "function"
"""How a function that has no name here is printed; it can be read by people only."""


@functools.cache
def _functions(module: str) -> dict[str, Function]:
    """The functions of one of the modules, by name."""
    holder, homes = _MODULES[module]
    found = {}
    for name, value in vars(holder).items():
        home = getattr(value, "__module__", None) or homes[0]
        if (
            callable(value)
            and not isinstance(value, (type, types.ModuleType))
            and not (name.startswith("__") or keyword.iskeyword(name))
            and home.partition(".")[0] in homes
            and home != "torch.serialization"
        ):
            found[name] = value
    return found


@functools.cache
def _names() -> dict[int, str]:
    """Identity of a function → its first name; the modules keep all of them alive."""
    names: dict[int, str] = {id(function): name for name, function in BARE.items()}
    for module in _MODULES:
        for name, function in _functions(module).items():
            names.setdefault(id(function), f"{module}.{name}")
    return names


def print_function(function: Function) -> str:
    """The name of a function, as ``read_function`` finds it.

    A function that a text cannot name, such as one of the user's own, is shown as
    ``function('module.name')``, which is not read back.
    """
    match function:
        case OpOverload() | OpOverloadPacket():
            namespace, _, name = str(function).partition(".")
            return print_path(f"torch.ops.{namespace}", name)
        case HigherOrderOperator():
            return print_path("torch.ops.higher_order", str(function))
    if id(function) in _names():
        return _names()[id(function)]
    module = getattr(function, "__module__", None) or "?"
    name = getattr(function, "__qualname__", None) or repr(function)
    return f"{CALL_FORM}({f'{module}.{name}'!r})"


def read_function(path: Path) -> Function:
    """The function that a path names. Raises ParseError with the near names."""
    if not path.steps:
        if path.start in BARE:
            return BARE[path.start]
        message = f"there is no function {path.start!r}: {near(path.start, BARE)}"
        raise path.line.error(message, path.whole)
    if (path.start, *path.steps[:1]) == ("torch", "ops"):
        return _read_operator(path)
    module = ".".join((path.start, *path.steps[:-1]))
    if module not in _MODULES:
        inside = [name for name in _MODULES if name.partition(".")[0] == path.start]
        message = f"a text names no functions of {module!r}: {near(module, inside)}"
        raise path.at(max(len(path.steps) - 2, 0), message)
    functions = _functions(module)
    name = path.steps[-1]
    if name not in functions:
        message = f"there is no function {name!r} in {module}: {near(name, functions)}"
        raise path.at(len(path.steps) - 1, message)
    return functions[name]


def _read_operator(path: Path) -> Function:
    match path.steps:
        case (_, "higher_order", name):
            found = getattr(torch.ops.higher_order, name, None)
            if isinstance(found, HigherOrderOperator):
                return found
            raise path.at(2, f"there is no operator {name!r} in torch.ops.higher_order")
        case (_, namespace, name):
            return _read_packet(path, namespace, name)
        case (_, namespace, name, overload):
            packet = _read_packet(path, namespace, name)
            overloads: list[str] = cast(Any, packet).overloads()
            if overload not in overloads:
                hint = near(overload, overloads)
                raise path.at(3, f"operator {name!r} has no overload {overload!r}: {hint}")
            found = getattr(packet, overload)
            assert isinstance(found, OpOverload)
            return found
    message = "write an operator as torch.ops.<namespace>.<operator>.<overload>"
    raise path.line.error(message, path.whole)


def _read_packet(path: Path, namespace: str, name: str) -> OpOverloadPacket:
    holder = getattr(torch.ops, namespace, None)
    packet = getattr(holder, name, None) if isinstance(holder, _OpNamespace) else None
    if isinstance(packet, OpOverloadPacket):
        return packet
    operators: dict[str, set[str]] = {}
    for full in torch._C._dispatch_get_all_op_names():
        other, _, operator_name = full.partition("::")
        operators.setdefault(other, set()).add(operator_name.partition(".")[0])
    if namespace not in operators:
        message = f"there is no namespace of operators {namespace!r}: {near(namespace, operators)}"
        raise path.at(1, message)
    hint = near(name, operators[namespace])
    raise path.at(2, f"there is no operator {name!r} in torch.ops.{namespace}: {hint}")
