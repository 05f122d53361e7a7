"""Print the arguments of a graph's nodes as Python expressions, and read them back safely."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from fxpipe.errors import InputError, near
from fxpipe.text.scan import Line
from fxpipe.text.target import ROOTS, Function, print_function, read_function, read_path

_NAMED = (torch.dtype, torch.layout, torch.memory_format)
_CALLS: dict[tuple[str, ...], tuple[Callable[..., Any], int]] = {
    ("slice",): (slice, 3),
    ("range",): (range, 3),
    ("complex",): (complex, 2),
    ("torch", "device"): (torch.device, 1),
}
"""Path of a constructor that an argument may call → the constructor and its argument count."""


def print_value(value: Any) -> str:
    """Print an argument as an expression that ``ValueReader`` reads back to an equal value.

    Raises:
        InputError: its type has no text.
    """
    match value:
        case fx.Node():
            return value.name
        case None | bool() | str() if type(value) in (type(None), bool, str):
            return repr(value)
        case int() | float() if type(value) in (int, float):
            return _print_number(value)
        case complex() if type(value) is complex:
            return f"complex({_print_number(value.real)}, {_print_number(value.imag)})"
        case tuple() if not hasattr(value, "_fields"):
            items = [print_value(item) for item in value]
            return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
        case list():
            return f"[{', '.join(print_value(item) for item in value)}]"
        case dict():
            pairs = (f"{print_value(key)}: {print_value(item)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        case slice() | range():
            ends = (print_value(end) for end in (value.start, value.stop, value.step))
            return f"{type(value).__name__}({', '.join(ends)})"
        case torch.device():
            return f"torch.device({str(value)!r})"
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case OpOverload() | OpOverloadPacket():
            return print_function(value)
    if value is Ellipsis:
        return "..."
    raise InputError(f"an argument of type {type(value).__name__} has no text: {value!r}")


def _print_number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        name = "math.nan" if math.isnan(value) else "math.inf"
        return f"-{name}" if value < 0 else name
    return repr(value)


class ValueReader:
    """Reads the arguments on one line, which may name these nodes and ``listed`` functions."""

    def __init__(
        self, line: Line, nodes: Mapping[str, fx.Node], listed: Mapping[str, Function]
    ) -> None:
        self.line = line
        self.nodes = nodes
        self.listed = listed

    def read(self, node: ast.expr) -> Any:
        """Read an expression. Raises ParseError if it is none that ``print_value`` makes."""
        match node:
            case ast.Name(id=name):
                return self.node(node, name)
            case ast.Constant(value=value) if not isinstance(value, (bytes, complex)):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.Tuple(elts=items):
                return tuple(self.read(item) for item in items)
            case ast.List(elts=items):
                return [self.read(item) for item in items]
            case ast.Dict():
                return self._dict(node)
            case ast.Call():
                return self._call(node)
            case ast.Attribute() | ast.Subscript():
                return self._path(node)
        raise self.line.error("not an argument that a graph can have", node)

    def node(self, at: ast.AST, name: str) -> fx.Node:
        """Return the node of that name, which an earlier line has made."""
        if name not in self.nodes:
            hint = near(name, self.nodes)
            raise self.line.error(f"no line above makes a node {name!r}: {hint}", at)
        return self.nodes[name]

    def constant(self, node: ast.expr) -> Any:
        """Read an expression that contains no node."""
        return ValueReader(self.line, {}, self.listed).read(node)

    def arguments(self, call: ast.Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Read the positional and the named arguments of a call."""
        args = tuple(self.read(item) for item in call.args)
        kwargs: dict[str, Any] = {}
        for item in call.keywords:
            if item.arg is None:
                raise self.line.error("write each argument by its name, not as '**'", item)
            if item.arg in kwargs:
                raise self.line.error(f"argument {item.arg!r} is given twice", item)
            kwargs[item.arg] = self.read(item.value)
        return args, kwargs

    def _number(self, node: ast.expr) -> int | float:
        value = self.constant(node) if not isinstance(node, ast.UnaryOp) else None
        if type(value) not in (int, float):
            raise self.line.error("only a number can be negative", node)
        assert isinstance(value, (int, float))
        return value

    def _dict(self, node: ast.Dict) -> dict[Any, Any]:
        items: dict[Any, Any] = {}
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            if key_node is None:
                raise self.line.error("write each item of a dict, not '**'", value_node)
            key = self.constant(key_node)
            try:
                repeated = key in items
            except TypeError:
                raise self.line.error("a key of a dict must be hashable", key_node) from None
            if repeated:
                raise self.line.error("this key is given twice", key_node)
            items[key] = self.read(value_node)
        return items

    def _call(self, node: ast.Call) -> Any:
        path = read_path(self.line, node.func)
        make, count = _CALLS.get((path.start, *path.steps) if path else (), (None, 0))
        if make is None:
            message = "an argument can call slice, range, complex and torch.device only"
            raise self.line.error(message, node)
        if len(node.args) != count or node.keywords:
            raise self.line.error(f"{make.__name__} takes {count} arguments by position", node)
        try:
            return make(*map(self.read, node.args))
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            message = str(error).partition("\n")[0]
            raise self.line.error(f"this {make.__name__} cannot be made: {message}", node) from None

    def _path(self, node: ast.expr) -> Any:
        path = read_path(self.line, node)
        if path is None or path.start not in ROOTS:
            raise self.line.error("an argument is a node or a constant, not a part of one", node)
        match (path.start, *path.steps):
            case ("math", "inf"):
                return math.inf
            case ("math", "nan"):
                return math.nan
            case ("torch", "ops", *_):
                return read_function(path, self.listed)
            case ("torch", name):
                constant = vars(torch).get(name)
                if isinstance(constant, _NAMED):
                    return constant
                known = [key for key, value in vars(torch).items() if isinstance(value, _NAMED)]
                raise path.at(0, f"torch.{name} is no constant: {near(name, known)}")
        raise self.line.error("this is no constant that a graph can have", node)
