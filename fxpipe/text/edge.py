"""An edge's text, as ``str(edge)`` gives it, read back: plans and programs both hold edges."""

from __future__ import annotations

import keyword
import re

from fxpipe.errors import ParseError
from fxpipe.ir.value import HOST, Edge

_FORM = "write an edge as 'act relu_3 0->1 gradient' or 'in x host->0'"
_WORD = re.compile(r"[^ \t]+")
_ENDS = re.compile(r"(host|0|[1-9][0-9]{0,8})->(host|0|[1-9][0-9]{0,8})")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST = 4_000
_KINDS = ("in", "act", "skip", "out")


def parse_edge(text: str, line: int, column: int) -> Edge:
    """Read one edge: kind, value, ends and, where one comes back, ``gradient``.

    Args:
        text: the edge and nothing else; spaces around it are allowed.
        line: where ``text`` stands, for errors.
        column: the column of its first character, from 1.

    Raises:
        ParseError: with the place of the first wrong word.
    """
    words = [(match[0], column + match.start()) for match in _WORD.finditer(text)]
    if len(words) < 3:
        raise ParseError(f"an edge has a kind, a value and its ends; {_FORM}", line, column)
    (kind, kind_at), (value, value_at), (ends, ends_at) = words[:3]
    if kind not in _KINDS:
        raise ParseError(f"{kind!r} is no kind of edge; {_FORM}", line, kind_at)
    if not is_name(value):
        raise ParseError(f"{value!r} is no name of a value; {_FORM}", line, value_at)
    match = _ENDS.fullmatch(ends)
    if match is None:
        raise ParseError(f"{ends!r} are no ends of an edge; {_FORM}", line, ends_at)
    gradient = len(words) > 3 and words[3][0] == "gradient"
    if len(words) > 3 + gradient:
        word, at = words[3 + gradient]
        raise ParseError(f"unexpected {word!r} after the edge; {_FORM}", line, at)
    source, target = (HOST if end == "host" else int(end) for end in match.groups())
    edge = Edge(source, target, value, gradient)
    if edge.kind != kind:
        raise ParseError(f"an edge {ends} is of kind {edge.kind!r}, not {kind!r}", line, kind_at)
    return edge


def is_name(text: str) -> bool:
    """Whether a text can name a value or a node: an ASCII identifier and no keyword.

    fx reads the digits at the end of a name as a number, and Python none of over 4,300.
    """
    fits = len(text) <= _LONGEST and _NAME.fullmatch(text) is not None
    return fits and not keyword.iskeyword(text)
