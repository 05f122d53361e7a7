"""Print an fx graph as text, one node per line, and parse it back.

Each line is Python syntax, which Python's own parser reads. The text is never run::

    x = placeholder()                                 # the graph's inputs come first
    p_weight = placeholder()
    relu_3 = pop('relu_3')                            # a value from an earlier stage
    conv2d = torch.ops.aten.conv2d.default(x, p_weight, None, [1, 1], [1, 1])
    h = self.encoder[0].block(conv2d)                 # a leaf module
    w = self.encoder[0].weight                        # an attribute of the root
    y = h.view(2, 3)                                  # a method of a value
    stash_y = stash('y', y)
    return (y, w)

The text leaves out what does not change the graph's result: metadata, type annotations, the name
of the output node, and whether a sequence is one of fx's immutable classes.
"""

from __future__ import annotations

import ast
import inspect
import keyword
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, fx, nn

from fxpipe.errors import InputError, near
from fxpipe.text.scan import Line, end_of, is_name, lines_of
from fxpipe.text.target import (
    CALL_FORM,
    ROOTS,
    Function,
    Path,
    named,
    print_function,
    print_path,
    read_function,
    read_path,
    refused_attribute,
    refused_method,
)
from fxpipe.text.value import ValueReader, print_value

_PLACEHOLDER = re.compile(r"\*{0,2}[A-Za-z_][A-Za-z0-9_]*")
_FORM = "write 'name = function(arguments)', or 'return (values)' at the end"
_METHOD_FORM = "method"


def print_graph(graph: fx.Graph) -> str:
    """Print a graph as text that ``parse_graph`` reads back, without a final line break.

    Raises:
        InputError: an argument of a node has no text; the message names the node.
    """
    order = sorted(graph.nodes, key=lambda node: node.op != "placeholder")
    return "\n".join(_print_node(node) for node in order)


def _print_node(node: fx.Node) -> str:
    try:
        if node.op == "output":
            return f"return {print_value(node.args[0])}"
        if not is_name(node.name):
            raise InputError("its name is no identifier")
        return f"{node.name} = {_print_expression(node)}"
    except InputError as error:
        raise InputError(f"node {node.name!r}: {error}") from None


def _print_expression(node: fx.Node) -> str:
    args, kwargs = [print_value(arg) for arg in node.args], dict(node.kwargs)
    target = node.target
    if node.op == "placeholder":
        named = [] if target == node.name else [repr(target)]
        default = [f"default={arg}" for arg in args]
        return f"placeholder({', '.join(named + default)})"
    if node.op == "get_attr":
        return print_path("self", str(target))
    if node.op == "call_module":
        function = print_path("self", str(target))
    elif node.op == "call_method":
        receiver = node.args[0] if node.args else None
        if isinstance(receiver, fx.Node) and receiver.name not in ROOTS:
            function, args = f"{args[0]}.{target}", args[1:]
        else:
            function, args = _METHOD_FORM, [repr(target), *args]
    else:
        assert not isinstance(target, str)
        function = print_function(target)
    for name in kwargs:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InputError(f"its argument {name!r} is no identifier")
    named = [f"{name}={print_value(value)}" for name, value in kwargs.items()]
    return f"{function}({', '.join(args + named)})"


def parse_graph(
    text: str, root: nn.Module | None, functions: Iterable[Function] = ()
) -> fx.GraphModule:
    """Read a graph from the text of ``print_graph``; see ``read_graph``."""
    return read_graph(lines_of(text), root, functions)


def read_graph(
    lines: list[Line], root: nn.Module | None, functions: Iterable[Function]
) -> fx.GraphModule:
    """Read a graph. Nothing that the text names is run, and nothing is imported.

    Args:
        lines: the text; blank lines, comments and indentation do not matter.
        root: the module with the leaf modules and attributes that the graph names.
        functions: functions that the text may name besides the list in ``fxpipe.text.target``.

    Raises:
        ParseError: with the line and column of the first error.
    """
    return _GraphReader(root, named(functions)).read(lines)


_Expression = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
"""Opcode, target, args and kwargs of the node that an expression stands for."""


class _GraphReader:
    """Reads the lines of one graph in order.

    Attributes:
        listed: name → function that the caller lets the text name.
        takes: the names of the graph's arguments so far.
    """

    def __init__(self, root: nn.Module | None, listed: Mapping[str, Function]) -> None:
        self.root = root
        self.listed = listed
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.takes: set[str] = set()

    def read(self, lines: list[Line]) -> fx.GraphModule:
        filled = [line for line in lines if not line.is_blank]
        rest = iter(filled)
        if not any(self._read_line(line) for line in rest):
            message = "the graph has no end: write 'return (values)' on its last line"
            raise end_of(filled or lines).error(message)
        for line in rest:
            raise line.error("nothing may follow the graph's 'return'", line.indent)
        try:
            # generates the code of ``forward``, but does not run it
            return fx.GraphModule(self.root if self.root is not None else nn.Module(), self.graph)
        except Exception as error:
            message = f"fx cannot make code of this graph: {error}"
            raise lines[0].error(message, lines[0].indent) from error

    def _read_line(self, line: Line) -> bool:
        """Add the line's node. Returns whether it is the output."""
        statement = line.statement()
        values = ValueReader(line, self.nodes, self.listed)
        match statement:
            case ast.Return(value=ast.expr() as value):
                self.graph.output(values.read(value))
                return True
            case ast.Assign(targets=[ast.Name(id=name) as target], value=value):
                if name in self.nodes:
                    raise line.error(f"an earlier line already makes a node {name!r}", target)
                if not is_name(name):
                    raise line.error(f"{name!r} is no name of a node", target)
                op, function, args, kwargs = self._expression(line, values, name, value)
                node = self.graph.create_node(op, function, args, kwargs, name=name)
                # fx renames nodes that would hide a builtin, unless the name is set afterwards
                if node.name != name:
                    node.name = name
                self.nodes[name] = node
                return False
        raise line.error(_FORM, statement)

    def _expression(
        self, line: Line, values: ValueReader, name: str, node: ast.expr
    ) -> _Expression:
        if not isinstance(node, ast.Call):
            path = read_path(line, node)
            if path is None or path.start != "self" or not path.steps:
                raise line.error(_FORM, node)
            self._find(path, module=False)
            return "get_attr", ".".join(path.steps), (), {}
        path = read_path(line, node.func)
        if path is None:
            return "call_function", self._spelt(line, node.func), *values.arguments(node)
        if path.steps and path.start not in ROOTS:
            return self._method(path, values, node)
        if path.start == "placeholder" and not path.steps:
            return self._placeholder(line, values, name, node)
        if path.start == _METHOD_FORM and not path.steps:
            return self._spelt_method(line, values, node)
        if path.start == "self" and path.steps:
            self._find(path, module=True)
            return "call_module", ".".join(path.steps), *values.arguments(node)
        function = read_function(path, self.listed)
        args, kwargs = values.arguments(node)
        if function is getattr:
            refused = refused_attribute(args[1] if len(args) == 2 and not kwargs else None)
            if refused:
                raise line.error(refused, node)
        if path.start == "operator":
            # fx writes these as operators, without a check that there are enough operands
            try:
                inspect.signature(function).bind(*args, **kwargs)
            except TypeError as error:
                raise line.error(f"wrong arguments: {error}", node) from None
        return "call_function", function, args, kwargs

    def _spelt(self, line: Line, node: ast.expr) -> Function:
        """Read ``function('module.name')``: a function that the caller has listed."""
        match node:
            case ast.Call(func=ast.Name(id=word), args=[ast.Constant(value=str(name))]) if (
                word == CALL_FORM
            ):
                if (function := self.listed.get(f"{CALL_FORM}({name!r})")) is not None:
                    return function
                roots = ", ".join(root for root in ROOTS if root != "self")
                message = (
                    f"a text can name only some functions of {roots} and some builtins; list "
                    "others: Plan.parse(text, functions=[...])"
                )
                raise line.error(message, node)
        raise line.error(_FORM, node)

    def _method(self, path: Path, values: ValueReader, node: ast.Call) -> _Expression:
        receiver = values.node(node, path.start)
        if len(path.steps) != 1 or not is_name(path.steps[0]):
            raise path.line.error("write a method of a node as 'node.method(arguments)'", node)
        if refused := refused_method(path.steps[0]):
            raise path.at(0, refused)
        args, kwargs = values.arguments(node)
        return "call_method", path.steps[0], (receiver, *args), kwargs

    def _spelt_method(self, line: Line, values: ValueReader, node: ast.Call) -> _Expression:
        """Read ``method('name', receiver)``: the receiver is no node, or is named like a root."""
        match node.args:
            case [ast.Constant(value=str(name)) as at, _, *_] if is_name(name):
                if refused := refused_method(name):
                    raise line.error(refused, at)
                args, kwargs = values.arguments(node)
                return "call_method", name, args[1:], kwargs
        raise line.error("write method('name', receiver, arguments)", node)

    def _placeholder(
        self, line: Line, values: ValueReader, name: str, node: ast.Call
    ) -> _Expression:
        if self.nodes and next(reversed(self.nodes.values())).op != "placeholder":
            raise line.error("placeholders come before all other nodes", node)
        target = name
        default: tuple[Any, ...] = ()
        match node.args:
            case [ast.Constant(value=str(target))] if _PLACEHOLDER.fullmatch(target):
                pass
            case [first, *_]:
                raise line.error("write placeholder() or placeholder('argument')", first)
        match node.keywords:
            case [ast.keyword(arg="default", value=value)]:
                default = (values.constant(value),)
            case [first_keyword, *_]:
                raise line.error("a placeholder takes 'default' alone", first_keyword)
        argument = target.lstrip("*")
        if argument in self.takes or keyword.iskeyword(argument) or argument == "self":
            raise line.error(f"the graph cannot take an argument {argument!r} here", node)
        self.takes.add(argument)
        return "placeholder", target, default, {}

    def _find(self, path: Path, *, module: bool) -> None:
        """Check that the root has what a path names, without running any of its code."""
        if self.root is None:
            whole = print_path("self", ".".join(path.steps))
            raise path.line.error(
                f"{whole} needs a root: pass the module that holds it", path.whole
            )
        holder: object = self.root
        for step, name in enumerate(path.steps):
            members = dict(_members(holder))
            last = step == len(path.steps) - 1
            if name not in members:
                cure = near(name, members)
                if not step and name.startswith("fxpipe_"):
                    cure = "pass pipe.traced.module, which has the model's submodules and this one"
                raise path.at(step, f"the root has nothing named {name!r} here: {cure}")
            holder = members[name]
            if not isinstance(holder, nn.Module) and (module or not last):
                raise path.at(step, f"{name!r} is no module")


def _members(holder: object) -> Iterator[tuple[str, object]]:
    """The submodules and tensors of a module, as they are stored."""
    if isinstance(holder, nn.Module):
        attributes = vars(holder)
        for kind in ("_modules", "_parameters", "_buffers"):
            yield from attributes.get(kind, {}).items()
        yield from ((name, x) for name, x in attributes.items() if isinstance(x, Tensor))
