"""An instruction as one line of text, and back."""

from __future__ import annotations

import re
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
from fxpipe.text.scan import Scanner

_WORDS: dict[type[Instruction], str] = {made: word for word, made in OPCODES.items()}
_WIDTH = max(map(len, OPCODES)) + 2
_WORD = re.compile(r"\w+")
_KEEP = re.compile(r"keep\b")
_HOST = re.compile(r"host\b")
_KIND = re.compile(r"(in|act|skip|out|grad|saved):")
_VALUE = re.compile(r"[^\W\d]\w*(?:\.\w+)*")


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
    instruction = _parse(OPCODES[word], scan)
    scan.end()
    return instruction


def _parse(made: type[Instruction], scan: Scanner) -> Instruction:
    if made is Barrier:
        return Barrier()
    if made is Pause:
        return Pause()
    if made is Update:
        stage = _numbered(scan, "s", "a stage such as s0")
        reads = _numbered(scan, "v", "a version such as v0")
        scan.gap("'->'")
        scan.literal("->")
        return Update(stage, reads, _numbered(scan, "v", "a version such as v1"))
    if made is Forward or made is Backward:
        stage = _numbered(scan, "s", "a stage and a micro-batch such as s0[0]")
        i = _index(scan)
        version = _numbered(scan, "v", "a version such as v0")
        if made is Backward:
            return Backward(stage, i, version)
        keeps = not scan.ended() and scan.text[scan.at - 1].isspace()
        return Forward(stage, i, version, keeps and scan.need(_KEEP, "'keep'") == "keep")
    scan.gap("a buffer such as act:x:0->1[0]")
    return made(parse_buffer(scan))  # type: ignore[call-arg, arg-type]


def parse_buffer(scan: Scanner) -> Buffer:
    """Read ``act:relu:0->1[2]`` or ``saved:1[2]``. Raises ParseError."""
    kind = scan.need(_KIND, "a buffer such as act:x:0->1[0] or saved:0[0]")[:-1]
    if kind == "saved":
        return saved(scan.number("a stage"), _index(scan))
    value = parse_value(scan)
    scan.literal(":")
    source, target = parse_ends(scan)
    return Buffer(cast(BufferKind, kind), value, source, target, _index(scan))


def parse_value(scan: Scanner) -> str:
    """Read the name of a value: Python identifiers joined by dots. Raises ParseError."""
    return scan.need(_VALUE, "a value's name such as relu_1")


def parse_ends(scan: Scanner) -> tuple[int, int]:
    """Read ``0->1`` or ``host->0``: source and target. Raises ParseError."""
    source = _stage(scan)
    scan.literal("->")
    return source, _stage(scan)


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
