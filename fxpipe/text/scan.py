"""Read one line of text from left to right; every complaint carries its line and column."""

from __future__ import annotations

import json
import re

from fxpipe.errors import InputError, ParseError

_NUMBER = re.compile(r"[0-9]+")
_TITLE = re.compile(r'[\w.+-]+|"(?:[^"\\]|\\.)*"')
_BLANKS = re.compile(r"[ \t\r]*")
_TOKEN = re.compile(r"[^ \t\r]*")
_DIGITS = 9


class Scanner:
    """One line and how far it has been read.

    Attributes:
        text: the line.
        line: its number in the whole text, from 1.
        at: index of the next character to read.
    """

    def __init__(self, text: str, line: int) -> None:
        self.text = text
        self.line = line
        self.at = 0

    def error(self, message: str, at: int | None = None) -> ParseError:
        """The error for the next character to read, or for the one at an index of the line."""
        return ParseError(message, self.line, (self.at if at is None else at) + 1)

    def take(self, pattern: re.Pattern[str]) -> str | None:
        """What the pattern matches right here, or None."""
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[0]

    def need(self, pattern: re.Pattern[str], what: str) -> str:
        """What the pattern matches right here; ``what`` says what was expected."""
        taken = self.take(pattern)
        if taken is None:
            raise self._expected(what)
        return taken

    def literal(self, text: str, what: str | None = None) -> None:
        """Exactly this text, right here."""
        if not self.text.startswith(text, self.at):
            raise self._expected(what or repr(text))
        self.at += len(text)

    def _expected(self, what: str) -> ParseError:
        found = _TOKEN.match(self.text, self.at)
        got = repr(found[0]) if found and found[0] else "the end of the line"
        return self.error(f"expected {what}, got {got}")

    def number(self, what: str) -> int:
        """A count or an index, right here."""
        start = self.at
        digits = self.need(_NUMBER, what)
        if len(digits) > _DIGITS:
            raise self.error(f"{what} has {len(digits)} digits; at most {_DIGITS} are read", start)
        return int(digits)

    def title(self, what: str) -> str:
        """A name as ``print_title`` writes it, right here."""
        start = self.at
        word = self.need(_TITLE, what)
        if not word.startswith('"'):
            return word
        try:
            return str(json.loads(word))
        except ValueError as error:
            raise self.error(
                f"{word} is not a quoted name: {error}; escape as JSON does", start
            ) from error

    def starts(self, word: str) -> bool:
        """Whether this word stands right here."""
        return re.compile(rf"{word}\b").match(self.text, self.at) is not None

    def comes(self, pattern: re.Pattern[str]) -> bool:
        """Whether the pattern matches right here; nothing is read."""
        return pattern.match(self.text, self.at) is not None

    def tail(self) -> str:
        """All that is left, without blanks at its end and a comment."""
        return self.text[self.at :].partition("#")[0].rstrip(" \t\r")

    def blanks(self) -> None:
        """Skip blanks, if any."""
        self.take(_BLANKS)

    def gap(self, what: str) -> None:
        """At least one blank, and then something that is not the end."""
        start = self.at
        self.blanks()
        if self.at == start or self.ended():
            raise self.error(f"expected a blank and {what}")

    def ended(self) -> bool:
        """Whether only blanks or a comment are left."""
        self.blanks()
        return self.at == len(self.text) or self.text[self.at] == "#"

    def end(self) -> None:
        """Nothing but blanks or a comment is left."""
        if not self.ended():
            start = self.at
            raise self.error(f"unexpected {self.take(_TOKEN)!r}; remove it", start)


def scan_lines(text: str) -> tuple[list[Scanner], Scanner]:
    """The lines of a text, each at its first word, and its end, for what is missing there.

    Comments (``# …``) and blank lines are left out.
    """
    parts = text_of(text).split("\n")
    lines = [Scanner(line, number) for number, line in enumerate(parts, start=1)]
    end = Scanner(lines[-1].text, len(lines))
    end.at = len(end.text)
    return [scan for scan in lines if not scan.ended()], end


def text_of(text: object) -> str:
    """The text itself. Raises InputError if it is none."""
    if not isinstance(text, str):
        raise InputError(f"a text is read, and this is a {type(text).__name__}; give a string")
    return text


def print_title(name: str) -> str:
    """A name as it stands in a header: as it is where it is one plain word, else quoted."""
    match = _TITLE.fullmatch(name)
    return name if match and not name.startswith('"') else json.dumps(name)
