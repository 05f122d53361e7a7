"""Reads a line of text as Python, with the exact column of an error in it, and dotted paths."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from fxpipe.errors import ParseError
from fxpipe.text.edge import is_name
from fxpipe.text.scan import text_of


@dataclass(frozen=True)
class Line:
    """A line of a text; spaces around it mean nothing.

    Attributes:
        text: the line as it stands, without its end.
        number: its number in the whole text, from 1.
    """

    text: str
    number: int

    @property
    def code(self) -> str:
        return self.text.strip()

    @property
    def indent(self) -> int:
        return len(self.text) - len(self.text.lstrip())

    @property
    def is_blank(self) -> bool:
        """Nothing to read: no text, or a comment alone."""
        return not self.code or self.code.startswith("#")

    def statement(self) -> ast.stmt:
        """The one statement on the line, as a syntax tree. Nothing runs."""
        try:
            body = ast.parse(self.code).body
        except SyntaxError as error:
            column = min(max(error.offset or 1, 1), len(self.code) + 1)
            raise self.error(f"cannot be read: {error.msg}", column - 1) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise self.error(f"cannot be read: {error or 'it nests too deep'}", 0) from None
        if len(body) != 1:
            at = body[1] if body else 0
            raise self.error("write one statement a line", at)
        return body[0]

    def error(self, message: str, at: ast.AST | int) -> ParseError:
        """An error at a part of the statement, or at a character of ``code``, from 0."""
        if isinstance(at, ast.AST):
            at = self._characters(getattr(at, "col_offset", 0))
        return ParseError(message, self.number, self.indent + at + 1)

    def error_at_end(self, message: str, node: ast.expr, length: int) -> ParseError:
        """An error at the last ``length`` characters of an expression, such as its last name."""
        end = self._characters(node.end_col_offset or 0)
        return self.error(message, max(end - length, 0))

    def _characters(self, count: int) -> int:
        """Characters in the first bytes of ``code``: syntax trees count bytes."""
        return len(self.code.encode()[:count].decode(errors="ignore"))


def lines_of(text: str, first_line: int = 1) -> list[Line]:
    """The lines of a text. The last end of line ends the text."""
    parts = text_of(text).removesuffix("\n").split("\n")
    return [Line(part.removesuffix("\r"), number) for number, part in enumerate(parts, first_line)]


_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")

ROOTS = ("self", "torch", "operator", "math", "fxpipe")
"""The names a path may start with. They take precedence over a node of the same name."""


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
