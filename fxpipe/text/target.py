"""The functions that a graph's text may name, and how it names them.

Parsing a name never runs anything, but running the parsed graph runs the functions that it names.
So a text may name only functions of a fixed list, those that occur in graphs of models: the
operators of aten, prims and fxpipe, higher-order operators such as cond, PyTorch's functions of
tensors, and the functions of Python's operator and math modules. It can name no private names, and
nothing that imports, loads or writes files, neither by a path nor as a method or attribute of a
value. A caller can list further functions, such as custom operators.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _OpNamespace

import fxpipe.random
from fxpipe.errors import InputError, ParseError, near
from fxpipe.ir.plan import pop, stash
from fxpipe.random.leaf_draws import draw_from
from fxpipe.text.scan import Line, is_name
from fxpipe.torchtools.moments import gather

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")

ROOTS = ("self", "torch", "operator", "math", "fxpipe")
"""The names that a path may start with. They take precedence over nodes of the same name."""


@dataclass(frozen=True)
class Path:
    """A path that was read, such as ``torch.ops.aten.relu``.

    Attributes:
        start: its first name.
        steps: the names after it.
        line: the line that it is on.
        nodes: for each step the expression that ends with it.
        whole: the whole expression.
    """

    start: str
    steps: tuple[str, ...]
    line: Line
    nodes: tuple[ast.expr, ...]
    whole: ast.expr

    def at(self, step: int, message: str) -> ParseError:
        """Return an error at one of the steps."""
        node = self.nodes[step]
        if isinstance(node, ast.Attribute):
            return self.line.error_at_end(message, node, len(node.attr))
        if isinstance(node, ast.Subscript):
            return self.line.error(message, node.slice)
        return self.line.error(message, node)


def print_path(start: str, target: str) -> str:
    """Print ``start`` and the dotted ``target`` as a Python expression."""
    whole = start
    for step in target.split("."):
        whole += (
            f".{step}" if is_name(step) else f"[{step if _INDEX.fullmatch(step) else repr(step)}]"
        )
    return whole


def read_path(line: Line, node: ast.expr) -> Path | None:
    """Return the path that an expression spells; None if it is something else."""
    steps: list[str] = []
    nodes: list[ast.expr] = []
    whole = node
    while not isinstance(node, ast.Name):
        nodes.append(node)
        match node:
            case ast.Attribute(value=inner, attr=name):
                steps.append(name)
            case ast.Subscript(value=inner, slice=ast.Constant(value=str(name))):
                steps.append(name)
            case ast.Subscript(value=inner, slice=ast.Constant(value=int(index))) if (
                type(index) is int and index < 10**9
            ):
                steps.append(str(index))
            case _:
                return None
        node = inner
    return Path(node.id, tuple(reversed(steps)), line, tuple(reversed(nodes)), whole)


Function = Callable[..., Any]

BARE: dict[str, Function] = {
    function.__name__: function
    for function in (
        *(stash, pop),
        *(abs, bool, divmod, float, getattr, int, isinstance, len),
        *(list, max, min, pow, round, sum, tuple),
    )
}
"""The functions that a text names without a module."""

_OPERATORS = ("aten", "prims", "fxpipe")
_GRAPH_OPERATORS = (
    *("cond", "while_loop", "scan", "associative_scan", "map_impl"),
    *("flex_attention", "flex_attention_backward"),
)
_BEYOND_TENSORS = (
    *("from_file", "_print", "set_data"),
    *("_cufft_clear_plan_cache", "_cufft_set_plan_cache_max_size", "_test_warn_in_autograd"),
)
"""Operators of aten that open files, write to the terminal, or change global state."""

_PYTHON = (
    *("abs", "add", "and_", "concat", "contains", "countOf", "eq", "floordiv", "ge", "getitem"),
    *("gt", "index", "indexOf", "inv", "invert", "is_", "is_not", "le", "length_hint", "lshift"),
    *("lt", "matmul", "mod", "mul", "ne", "neg", "not_", "or_", "pos", "pow", "rshift", "sub"),
    *("truediv", "truth", "xor", "delitem", "setitem", "iadd", "iand", "iconcat", "ifloordiv"),
    *("ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub", "itruediv", "ixor"),
)

_TORCH: dict[str, tuple[types.ModuleType, str]] = {
    "torch": (torch, ""),
    "torch.nn.functional": (torch.nn.functional, ""),
    "torch.linalg": (torch.linalg, "linalg_"),
    "torch.fft": (torch.fft, "fft_"),
    "torch.special": (torch.special, "special_"),
    "torch._C._nn": (torch._C._nn, ""),
}
"""Name of a module → the module, and the prefix of its functions' names in aten."""

_OWN: dict[str, Iterable[Function]] = {
    "fxpipe.random": fxpipe.random.FUNCTIONS,
    "fxpipe.random.leaf_draws": (draw_from,),
    "fxpipe.torchtools.moments": (gather,),
}
"""Name of a module of this library → its functions that occur in graphs."""

_MODULES = ("operator", "math", *_TORCH, *_OWN)
_OF_DICTS = ("get", "items", "keys")
_NOT_ON_TENSORS = frozenset(
    (
        *("apply_", "map_", "map2_", "numpy", "backward", "module_load", "share_memory_"),
        *("register_hook", "register_post_accumulate_grad_hook", "storage", "untyped_storage"),
        *("data_ptr", "const_data_ptr"),
    )
)
"""Methods of tensors that call functions, or that return memory or objects that can write files."""

CALL_FORM = "function"
"""Functions that a text cannot name are printed as ``function('module.name')``."""


@functools.cache
def _functions(module: str) -> dict[str, Function]:
    """The functions of one of the modules, by name."""
    match module:
        case "operator":
            return {name: getattr(operator, name) for name in _PYTHON}
        case "math":
            members = vars(math).items()
            return {name: f for name, f in members if callable(f) and not name.startswith("_")}
        case _ if module in _OWN:
            return {function.__name__: function for function in _OWN[module]}
    holder, prefix = _TORCH[module]
    overridable = torch.overrides.get_overridable_functions().values()
    of_tensors = {id(function) for functions in overridable for function in functions}
    return {
        name: function
        for name, function in vars(holder).items()
        if callable(function)
        and not isinstance(function, (type, types.ModuleType))
        and (not name.startswith("_") or name.startswith("_sym_"))
        and (id(function) in of_tensors or _find_packet("aten", prefix + name))
        and name not in _BEYOND_TENSORS
    }


@functools.cache
def _names(module: str) -> dict[int, str]:
    """Id of a function of one of the modules, or of BARE for "" → its first name there."""
    names: dict[int, str] = {}
    for name, function in (_functions(module) if module else BARE).items():
        names.setdefault(id(function), f"{module}.{name}" if module else name)
    return names


def print_function(function: Function) -> str:
    """Print the name of a function, which ``read_function`` reads back.

    A function that a text cannot name, such as the user's own, becomes
    ``function('module.name')``, which is read back only if the caller lists the function.
    """
    match function:
        case OpOverload() | OpOverloadPacket():
            namespace, _, name = str(function).partition(".")
            return print_path(f"torch.ops.{namespace}", name)
        case HigherOrderOperator():
            return print_path("torch.ops.higher_order", str(function))
    for module in ("", *_MODULES):  # torch's come last, as collecting their names takes time
        if id(function) in _names(module):
            return _names(module)[id(function)]
    module = getattr(function, "__module__", None) or "?"
    name = getattr(function, "__qualname__", None) or repr(function)
    return f"{CALL_FORM}({f'{module}.{name}'!r})"


def named(functions: Iterable[Function]) -> dict[str, Function]:
    """Printed name → function, with operators' overloads; InputError if one is not callable."""
    names: dict[str, Function] = {}
    for function in functions:
        if not callable(function):
            raise InputError(f"functions holds {function!r}; list functions and operators")
        names[print_function(function)] = function
        if isinstance(function, OpOverloadPacket):
            overloads: list[str] = cast(Any, function).overloads()
            names |= named(getattr(function, overload) for overload in overloads)
    return names


def read_function(path: Path, listed: Mapping[str, Function]) -> Function:
    """Return the function that a path names. Raises ParseError with similar names.

    Args:
        path: the path.
        listed: whole name → function that the caller lets the text name.
    """
    whole = print_path(path.start, ".".join(path.steps)) if path.steps else path.start
    if (function := listed.get(whole)) is not None:
        return function
    if not path.steps:
        if path.start in BARE:
            return BARE[path.start]
        message = f"there is no function {path.start!r}: {_hint(path.start, BARE)}"
        raise path.line.error(message, path.whole)
    if (path.start, *path.steps[:1]) == ("torch", "ops"):
        return _read_operator(path)
    module = ".".join((path.start, *path.steps[:-1]))
    if module not in _MODULES:
        inside = [name for name in _MODULES if name.partition(".")[0] == path.start]
        message = f"a text names no functions of {module!r}: {_hint(module, inside)}"
        raise path.at(max(len(path.steps) - 2, 0), message)
    functions = _functions(module)
    name = path.steps[-1]
    if name not in functions:
        what = f"there is no function {name!r} in {module} that a text can name"
        raise path.at(len(path.steps) - 1, f"{what}: {_hint(name, functions)}")
    return functions[name]


def refused_method(name: str) -> str:
    """Why a text cannot call a method of this name; "" where it can."""
    if name in _methods():
        return ""
    return f"there is no method {name!r} that a text can call: {near(name, _methods())}"


def refused_attribute(name: object) -> str:
    """Why a text cannot read an attribute of this name with ``getattr``; "" where it can."""
    if not isinstance(name, str) or name.startswith("_"):
        return "write getattr(value, 'name') with a name that does not begin with '_'"
    if callable(getattr(Tensor, name, None)):
        return f"{name!r} is a method, which a text can only call: value.{name}(arguments)"
    return ""


@functools.cache
def _methods() -> frozenset[str]:
    """The methods that a text can call: those of tensors, and those that read a dict."""
    names = (n for n in dir(Tensor) if not n.startswith("_") and callable(getattr(Tensor, n)))
    return frozenset((*names, *_OF_DICTS)) - _NOT_ON_TENSORS


def _read_operator(path: Path) -> Function:
    match path.steps:
        case (_, "higher_order", name):
            function = getattr(torch.ops.higher_order, name, None)
            if name in _GRAPH_OPERATORS and isinstance(function, HigherOrderOperator):
                return function
            hint = _hint(name, _GRAPH_OPERATORS)
            raise path.at(2, f"there is no operator {name!r} that takes graphs: {hint}")
        case (_, namespace, name, *overload) if len(overload) < 2:
            if namespace not in _OPERATORS:
                hint = _hint(namespace, _OPERATORS)
                raise path.at(1, f"a text names no operators of {namespace!r}: {hint}")
            packet = _find_packet(namespace, name)
            if packet is None or name in _BEYOND_TENSORS:
                where = f"torch.ops.{namespace} that a text can name"
                hint = _hint(name, _operators(namespace))
                raise path.at(2, f"there is no operator {name!r} in {where}: {hint}")
            overloads = list(_overloads(packet))
            if not overload:
                return packet
            if overload[0] not in overloads:
                hint = near(overload[0], overloads)
                raise path.at(3, f"operator {name!r} has no overload {overload[0]!r}: {hint}")
            return cast(Function, getattr(packet, overload[0]))
    message = "write an operator as torch.ops.<namespace>.<operator>.<overload>"
    raise path.line.error(message, path.whole)


def _find_packet(namespace: str, name: str) -> OpOverloadPacket | None:
    """Return the operator of that name if it has kernels in the dispatcher. TorchScript's own
    operators have none; some of them write files."""
    holder = getattr(torch.ops, namespace)
    packet = getattr(holder, name, None) if isinstance(holder, _OpNamespace) else None
    if isinstance(packet, OpOverloadPacket) and any(_overloads(packet)):
        return packet
    return None


def _overloads(packet: OpOverloadPacket) -> Iterator[str]:
    for overload in cast(list[str], cast(Any, packet).overloads()):
        if torch._C._dispatch_has_kernel(getattr(packet, overload).name()):
            yield overload


def _operators(namespace: str) -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    inside = (full.partition("::")[2] for full in names if full.startswith(f"{namespace}::"))
    return {name.partition(".")[0] for name in inside}.difference(_BEYOND_TENSORS)


def _hint(name: str, known: Iterable[str]) -> str:
    return f"{near(name, known)}; list a function of your own: Plan.parse(text, functions=[...])"
