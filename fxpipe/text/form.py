"""Forms: templates that print the fields of an object in a line, and read them back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from string import Formatter
from typing import Any, NamedTuple

from fxpipe.ir.value import HOST, batch_mark, stage_name
from fxpipe.text.scan import Line, is_name, print_title

_MARKS = re.compile(r"'+|\++")
_END = re.compile(r"(?:host|0|[1-9][0-9]{0,8})(?!\w)")
_EDGE = re.compile(r"(?:in|act|skip|out|grad)\b")
_WORD = re.compile(r"\w+")


class FieldForm(NamedTuple):
    """How a field is read and printed. ``read`` gets the end of the message for a missing field."""

    read: Callable[[Line, str], Any]
    text: Callable[[Any], str] = str


def _signed(line: Line, what: str) -> int:
    sign = -1 if line.skip("-") else 1
    return sign * line.integer(f"a number{what}")


def _batch(line: Line, what: str) -> int:
    marks = line.take(_MARKS) or ""
    return len(marks) if marks.startswith("+") else -len(marks)


def _value(line: Line, what: str) -> str:
    start = line.at
    name = line.need(_WORD, f"the name of a value{what}")
    if not is_name(name):
        raise line.error(f"{name!r} is no name of a value", start)
    return name


def _end(line: Line, what: str) -> int:
    end = line.need(_END, f"a stage's number or 'host'{what}")
    return HOST if end == "host" else int(end)


KINDS = {
    "": FieldForm(lambda line, what: line.integer(f"a number{what}")),
    "signed": FieldForm(_signed),
    "batch": FieldForm(_batch, batch_mark),
    "edge": FieldForm(lambda line, what: line.need(_EDGE, f"a kind of edge{what}")),
    "word": FieldForm(lambda line, what: line.need(_WORD, f"a word{what}")),
    "title": FieldForm(lambda line, what: line.title(f"a name{what}"), print_title),
    "value": FieldForm(_value),
    "end": FieldForm(_end, stage_name),
}
"""The kinds of fields that a template can name after the colon."""


class Form:
    """The form of an object's fields in a line, such as ``s{stage}[{microbatch}{batch:batch}]``.

    Attributes:
        example: a text of this form, for messages.
        flags: word → the field that is true if the word follows the other fields.
    """

    def __init__(self, template: str, example: str, **flags: str) -> None:
        """Make a form from a ``str.format`` template with the kind of each field. A blank in it
        stands for any number of blanks."""
        self.example = example
        self.flags = flags
        self._pieces: list[tuple[str, list[tuple[str, str]], str | None, FieldForm, str]] = []
        as_in = f", as in {example}"
        for text, field, kind, _ in Formatter().parse(template):
            after = f" after {text.strip()!r}" if text.strip() else ""
            words = [(word, (repr(word) if word else "more") + as_in) for word in text.split(" ")]
            self._pieces.append((text, words, field, KINDS[kind or ""], after + as_in))

    def text(self, holder: object) -> str:
        """Print the fields of an object."""
        parts = [
            t + (kind.text(getattr(holder, f)) if f else "") for t, _, f, kind, _ in self._pieces
        ]
        flags = [f" {word}" for word, field in self.flags.items() if getattr(holder, field)]
        return "".join(parts + flags)

    def read(self, line: Line) -> dict[str, Any]:
        """Read the fields, but not the flags: field → value, False for each flag."""
        values: dict[str, Any] = dict.fromkeys(self.flags.values(), False)
        for _, words, field, kind, after in self._pieces:
            for place, (word, what) in enumerate(words):
                if place:
                    line.gap(what)
                if word:
                    line.literal(word, what)
            if field:
                values[field] = kind.read(line, after)
        return values


def options(line: Line, *words: str) -> Iterator[str]:
    """Read optional words up to the end of the line; yields each word. Each may come once.

    After a word that ends with ``=``, the caller reads its value before it continues.
    """
    left = list(words)
    while line.more():
        word = next((word for word in left if line.starts(word)), None)
        if word is None:
            raise line.expected(" or ".join([*map(repr, left), "the end of the line"]))
        left.remove(word)
        line.literal(word)
        yield word
