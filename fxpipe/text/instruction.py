"""An instruction as one line of text, and back."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import assert_never, cast

from fxpipe.edge import HOST
from fxpipe.errors import near
from fxpipe.program import (
    OPCODES,
    Backward,
    Barrier,
    Buffer,
    BufferKind,
    Forward,
    Free,
    Instruction,
    Load,
    Output,
    Pause,
    Pop,
    Receive,
    Send,
    Stash,
    Update,
    saved,
)
from fxpipe.text.edge import is_name
from fxpipe.text.scan import Scanner

_WORDS: dict[type[Instruction], str] = {made: word for word, made in OPCODES.items()}
_WIDTH = max(map(len, OPCODES)) + 2
_WORD = re.compile(r"\w+")
_KEEP = re.compile(r"keep\b")
_HOST = re.compile(r"host\b")
_KIND = re.compile(r"(in|act|skip|out|grad|saved):")
_MOVES: dict[str, Callable[[Buffer], Instruction]] = {
    "load": Load,
    "output": Output,
    "send": Send,
    "recv": Receive,
    "stash": Stash,
    "pop": Pop,
    "free": Free,
}


def print_instruction(instruction: Instruction) -> str:
    """An instruction in one line, for messages: ``forward s1[2] v0 keep``."""
    return f"{_WORDS[type(instruction)]} {_operands(instruction)}".rstrip()


def print_column(instruction: Instruction) -> str:
    """The same for lists, with the operands in a column of their own."""
    return f"{_WORDS[type(instruction)]:<{_WIDTH}}{_operands(instruction)}".rstrip()


def _operands(instruction: Instruction) -> str:
    match instruction:
        case Load(buffer) | Output(buffer) | Send(buffer) | Receive(buffer):
            return str(buffer)
        case Stash(buffer) | Pop(buffer) | Free(buffer):
            return str(buffer)
        case Forward(stage, i, version, keeps):
            return f"s{stage}[{i}] v{version}" + (" keep" if keeps else "")
        case Backward(stage, i, version):
            return f"s{stage}[{i}] v{version}"
        case Update(stage, reads, writes):
            return f"s{stage} v{reads} -> v{writes}"
        case Barrier() | Pause():
            return ""
        case _:
            assert_never(instruction)


def parse_instruction(scan: Scanner) -> Instruction:
    """Read the rest of a line as one instruction. Raises ParseError."""
    start = scan.at
    word = scan.need(_WORD, "an instruction such as 'forward s0[0] v0 keep'")
    if word not in OPCODES:
        raise scan.error(f"there is no instruction {word!r}: {near(word, OPCODES)}", start)
    instruction = _parse(word, scan)
    scan.end()
    return instruction


def _parse(word: str, scan: Scanner) -> Instruction:
    match word:
        case "barrier":
            return Barrier()
        case "pause":
            return Pause()
        case "update":
            stage = _numbered(scan, "s", "a stage such as s0")
            reads = _numbered(scan, "v", "a version such as v0")
            scan.gap("'->'")
            scan.literal("->")
            return Update(stage, reads, _numbered(scan, "v", "a version such as v1"))
        case "forward":
            return Forward(*_task(scan), keeps=_keeps(scan))
        case "backward":
            return Backward(*_task(scan))
    scan.gap("a buffer such as act:x:0->1[0]")
    return _MOVES[word](parse_buffer(scan))


def _task(scan: Scanner) -> tuple[int, int, int]:
    """Stage, micro-batch and version: ``s1[2] v0``."""
    stage = _numbered(scan, "s", "a stage and a micro-batch such as s0[0]")
    return stage, _index(scan), _numbered(scan, "v", "a version such as v0")


def _keeps(scan: Scanner) -> bool:
    if scan.ended():
        return False
    if not scan.text[scan.at - 1].isspace():
        raise scan.error("expected a blank or the end of the line")
    scan.need(_KEEP, "'keep' or the end of the line")
    return True


def parse_buffer(scan: Scanner) -> Buffer:
    """Read ``act:relu:0->1[2]`` or ``saved:1[2]``. Raises ParseError."""
    kind = scan.need(_KIND, "a buffer such as act:x:0->1[0] or saved:0[0]")[:-1]
    if kind == "saved":
        return saved(scan.number("a stage"), _index(scan))
    start = scan.at
    value = scan.need(_WORD, "the name of a value")
    if not is_name(value):
        raise scan.error(f"{value!r} is no name of a value", start)
    scan.literal(":")
    source = _stage(scan)
    scan.literal("->")
    return Buffer(cast(BufferKind, kind), value, source, _stage(scan), _index(scan))


def _stage(scan: Scanner) -> int:
    return HOST if scan.take(_HOST) else scan.number("a stage's number or 'host'")


def _index(scan: Scanner) -> int:
    scan.literal("[", "a micro-batch such as [0]")
    index = scan.number("a micro-batch")
    scan.literal("]")
    return index


def _numbered(scan: Scanner, letter: str, what: str) -> int:
    scan.gap(what)
    scan.literal(letter, what)
    return scan.number(what)
