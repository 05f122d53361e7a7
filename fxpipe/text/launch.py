"""How an instruction is launched, as the rest of its line of text, and back."""

from __future__ import annotations

import re

from fxpipe.ir.program import COMPUTE, Event, Launch
from fxpipe.text.scan import Scanner

STARTS = re.compile(r"(?:stream|wait|record)=")
"""With what the rest of a line begins that says how its instruction is launched."""

_STREAM = re.compile(r"[a-z]+[0-9]*")
_MARKS = re.compile(r"'+|\++")
_COMMA = re.compile(r",")
_EVENT = "an event such as e3"


def print_launch(launch: Launch) -> str:
    """``stream=in0 wait=e3,e7' record=e8``; nothing for one that only computes."""
    parts = []
    if launch.stream != COMPUTE:
        parts.append(f"stream={launch.stream}")
    if launch.waits:
        parts.append(f"wait={','.join(map(str, launch.waits))}")
    if launch.record is not None:
        parts.append(f"record={launch.record}")
    return " ".join(parts)


def parse_launch(scan: Scanner) -> Launch:
    """Read the rest of a line, to its end. Raises ParseError."""
    stream, waits, record = COMPUTE, [], None
    if _has(scan, "stream"):
        stream = scan.need(_STREAM, "a stream such as in0")
    if _has(scan, "wait"):
        waits.append(_event(scan))
        while scan.take(_COMMA):
            waits.append(_event(scan))
    if _has(scan, "record"):
        record = _event(scan)
    scan.end()
    return Launch(stream, tuple(waits), record)


def _has(scan: Scanner, word: str) -> bool:
    """Whether ``word=`` comes next, behind a blank; it is read."""
    return not scan.ended() and scan.take(re.compile(rf"(?<=[ \t\r]){word}=")) is not None


def _event(scan: Scanner) -> Event:
    scan.literal("e", _EVENT)
    number = scan.number(_EVENT)
    marks = scan.take(_MARKS) or ""
    return Event(number, len(marks) if marks.startswith("+") else -len(marks))
