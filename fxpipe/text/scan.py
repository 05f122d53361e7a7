"""Read lines of text from left to right; every error has its line and column."""

from __future__ import annotations

import json
import keyword
import re

from fxpipe.errors import InputError, ParseError

_NUMBER = re.compile(r"[0-9]+")
_TITLE = re.compile(r'[\w.+-]+|"(?:[^"\\]|\\.)*"')
_BLANKS = re.compile(r"[ \t\r]*")
_TOKEN = re.compile(r"[^ \t\r]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIGITS = 9
_SHOWN = 80


class Line:
    """One line, and how far it has been read.

    Attributes:
        text: the line, without its line break.
        number: its number in the whole text, from 1.
        at: the index of the next character to read.
    """

    def __init__(self, text: str, number: int) -> None:
        self.text = text
        self.number = number
        self.at = 0

    def error(self, message: str, at: int | None = None) -> ParseError:
        """Return an error at an index; by default at ``self.at``."""
        return ParseError(message, self.number, (self.at if at is None else at) + 1)

    def take(self, pattern: re.Pattern[str]) -> str | None:
        """Read and return what the pattern matches at the current position; None if nothing."""
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[0]

    def need(self, pattern: re.Pattern[str], what: str) -> str:
        """``take``, which raises if nothing matches; ``what`` says what was expected."""
        taken = self.take(pattern)
        if taken is None:
            raise self.expected(what)
        return taken

    def skip(self, text: str) -> bool:
        """Read this text if it comes next. Returns whether it did."""
        comes = self.text.startswith(text, self.at)
        self.at += len(text) * comes
        return comes

    def literal(self, text: str, what: str | None = None) -> None:
        """``skip``, which raises if something else comes next."""
        if not self.skip(text):
            raise self.expected(what or repr(text))

    def expected(self, what: str) -> ParseError:
        """Return the error that something else comes next."""
        match = _TOKEN.match(self.text, self.at)
        token = match[0] if match else ""
        cut = f"{token[:_SHOWN]}…" if len(token) > _SHOWN else token
        got = repr(cut) if cut else "the end of the line"
        return self.error(f"expected {what}, got {got}")

    def integer(self, what: str) -> int:
        """Read a count or an index."""
        start = self.at
        digits = self.need(_NUMBER, what)
        if len(digits) > _DIGITS:
            raise self.error(f"{what} has {len(digits)} digits; at most {_DIGITS} are read", start)
        return int(digits)

    def title(self, what: str) -> str:
        """Read a name as ``print_title`` writes it."""
        start = self.at
        word = self.need(_TITLE, what)
        if not word.startswith('"'):
            return word
        try:
            name = str(json.loads(word))
            name.encode()  # refuses a lone surrogate, which could not be printed
        except ValueError as error:
            raise self.error(
                f"{word!a} is not a quoted name: {error}; escape as JSON does", start
            ) from error
        return name

    def starts(self, word: str) -> bool:
        """Whether this word comes next. One that ends with ``=`` may be followed by anything."""
        end = "" if word.endswith("=") else r"\b"
        return re.compile(word + end).match(self.text, self.at) is not None

    def gap(self, what: str) -> None:
        """Skip blanks. Raises if there are none, or if nothing follows."""
        start = self.at
        if self.ended() or self.at == start:
            raise self.error(f"expected a blank and {what}")

    def more(self) -> bool:
        """Whether something follows. Raises if there is no blank before it."""
        if self.ended():
            return False
        if self.at and not self.text[self.at - 1].isspace():
            raise self.error("expected a blank or the end of the line")
        return True

    def ended(self) -> bool:
        """Skip blanks. Returns whether nothing but a comment is left."""
        self.take(_BLANKS)
        return self.at == len(self.text) or self.text[self.at] == "#"

    def end(self) -> None:
        """Raise if anything but blanks or a comment is left."""
        if not self.ended():
            start = self.at
            raise self.error(f"unexpected {self.take(_TOKEN)!r}; remove it", start)


def lines_of(text: object) -> list[Line]:
    """Split a text into lines. Raises InputError if it is no string."""
    if not isinstance(text, str):
        raise InputError(f"cannot parse a {type(text).__name__}; give a string")
    parts = enumerate(text.split("\n"), 1)
    return [Line(part.removesuffix("\r"), number) for number, part in parts]


def end_of(lines: list[Line]) -> Line:
    """Return the end of a text, for errors about something missing there."""
    end = Line(lines[-1].text, lines[-1].number)
    end.at = len(end.text)
    return end


def print_title(name: str) -> str:
    """Print a name for a header: quoted unless it is one plain word."""
    match = _TITLE.fullmatch(name)
    return name if match and not name.startswith('"') else json.dumps(name)


def is_name(text: str) -> bool:
    """Whether a text can name a value or a node: an ASCII identifier and no keyword."""
    return _NAME.fullmatch(text) is not None and not keyword.iskeyword(text)
