"""Dotted paths such as ``self.encoder[0].weight`` or ``torch.ops.aten.relu.default``."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from fxpipe.errors import ParseError
from fxpipe.text.edge import is_name
from fxpipe.text.line import Line

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")

ROOTS = ("self", "torch", "operator", "math", "fxpipe")
"""What a path may start from. They win over a node of the same name."""


@dataclass(frozen=True)
class Path:
    """A path as it was read.

    Attributes:
        start: the name that it starts with.
        steps: the names after it.
        line: the line that it stands on.
        nodes: the part of the syntax tree that ends with each step.
        whole: the whole of it.
    """

    start: str
    steps: tuple[str, ...]
    line: Line
    nodes: tuple[ast.expr, ...]
    whole: ast.expr

    def at(self, step: int, message: str) -> ParseError:
        """An error at one of the steps."""
        node = self.nodes[step]
        if isinstance(node, ast.Attribute):
            return self.line.error_at_end(message, node, len(node.attr))
        if isinstance(node, ast.Subscript):
            return self.line.error(message, node.slice)
        return self.line.error(message, node)


def print_path(start: str, target: str) -> str:
    """``start`` and the dotted ``target`` after it, as an expression that Python can read."""
    return start + "".join(_print_step(step) for step in target.split("."))


def _print_step(step: str) -> str:
    if is_name(step):
        return f".{step}"
    return f"[{step}]" if _INDEX.fullmatch(step) else f"[{step!r}]"


def read_path(line: Line, node: ast.expr) -> Path | None:
    """The path that an expression is, or None if it is something else."""
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
