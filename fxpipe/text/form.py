"""Forms: how the fields of a value stand in a line, to print them and to read them back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from string import Formatter
from typing import Any, NamedTuple

from fxpipe.ir.value import HOST, batch_mark, stage_name
from fxpipe.text.scan import Line, is_name, print_title

_MARKS = re.compile(r"'+|\++")
_END = re.compile(r"(?:host|0|[1-9][0-9]{0,8})(?!\w)")
_EDGE = re.compile(r"(?:in|act|skip|out)\b")
_WORD = re.compile(r"\w+")


class Kind(NamedTuple):
    """How a field is read, with the end of the message where it is not there, and printed."""

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
    "": Kind(lambda line, what: line.integer(f"a number{what}")),
    "signed": Kind(_signed),
    "batch": Kind(_batch, batch_mark),
    "edge": Kind(lambda line, what: line.need(_EDGE, f"a kind of edge{what}")),
    "word": Kind(lambda line, what: line.need(_WORD, f"a word{what}")),
    "title": Kind(lambda line, what: line.title(f"a name{what}"), print_title),
    "value": Kind(_value),
    "end": Kind(_end, stage_name),
}
"""What a template names behind the colon of a field."""


class Form:
    """Fields of a value as they stand in a line, such as ``s{stage}[{microbatch}{batch:batch}]``.

    Attributes:
        example: a text of this form, for messages.
        flags: word → field, for what is true where its word stands behind the others.
    """

    def __init__(self, template: str, example: str, **flags: str) -> None:
        """A template is one of ``str.format``, with the kind of each field; a blank in it stands
        for any number of them."""
        self.example = example
        self.flags = flags
        self._pieces: list[tuple[str, list[tuple[str, str]], str | None, Kind, str]] = []
        for text, field, kind, _ in Formatter().parse(template):
            such, behind = f", as in {example}", f" after {text.strip()!r}" * bool(text.strip())
            words = [(word, (repr(word) if word else "more") + such) for word in text.split(" ")]
            self._pieces.append((text, words, field, KINDS[kind or ""], behind + such))

    def text(self, holder: object) -> str:
        """The fields of an object, as they are read back."""
        parts = [
            t + (kind.text(getattr(holder, f)) if f else "") for t, _, f, kind, _ in self._pieces
        ]
        flags = [f" {word}" for word, field in self.flags.items() if getattr(holder, field)]
        return "".join(parts + flags)

    def read(self, line: Line) -> dict[str, Any]:
        """Field → its value, from here on; those of flags are False."""
        found: dict[str, Any] = dict.fromkeys(self.flags.values(), False)
        for _, words, field, kind, behind in self._pieces:
            for place, (word, what) in enumerate(words):
                if place:
                    line.gap(what)
                if word:
                    line.literal(word, what)
            if field:
                found[field] = kind.read(line, behind)
        return found


def options(line: Line, *words: str) -> Iterator[str]:
    """The words of these that come next, each once and behind a blank, to the end of the line.

    Behind one that ends with ``=`` the caller reads its value before it goes on.
    """
    left = list(words)
    while line.more():
        word = next((word for word in left if line.starts(word)), None)
        if word is None:
            raise line.expected(" or ".join([*map(repr, left), "the end of the line"]))
        left.remove(word)
        line.literal(word)
        yield word
