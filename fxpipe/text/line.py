"""One line of text read as Python's syntax, and the exact place of what is wrong in it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from fxpipe.errors import ParseError
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
