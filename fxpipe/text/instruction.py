"""Prints an instruction and how it is launched as one line of text, and parses it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import assert_never, cast, get_args

from fxpipe.errors import near
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import COMPUTE, Event, Launch
from fxpipe.ir.value import HOST, KEPT, Buffer, BufferKind, batch_mark
from fxpipe.text.edge import is_name
from fxpipe.text.scan import Scanner

STARTS = re.compile(r"(?:stream|wait|record)=")
"""The words with which the launch part of a line begins."""

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


_WORDS: dict[type[ins.Instruction], str] = {made: word for word, made in ins.OPCODES.items()}
_WIDTH = max(map(len, ins.OPCODES)) + 2
_WORD = re.compile(r"\w+")
_HOST = re.compile(r"host\b")
_KIND = re.compile(rf"({'|'.join(get_args(BufferKind))}):")
_BATCH = re.compile(r"'+|\++")
_MINUS = re.compile(r"-")
_MOVES: dict[str, Callable[[Buffer], ins.Instruction]] = {
    "load": ins.Load,
    "output": ins.Output,
    "send": ins.Send,
    "recv": ins.Receive,
    "stash": ins.Stash,
    "pop": ins.Pop,
    "free": ins.Free,
}
_HALVES: dict[str, Callable[[int, int, int, int], ins.Instruction]] = {
    "recompute": ins.Recompute,
    "backward": ins.Backward,
    "input_grad": ins.InputGrad,
    "weight_grad": ins.WeightGrad,
}


def print_instruction(instruction: ins.Instruction) -> str:
    """An instruction in one line, for messages: ``forward s1[2] v0 keep``."""
    return f"{_WORDS[type(instruction)]} {_operands(instruction)}".rstrip()


def print_column(instruction: ins.Instruction) -> str:
    """The same for lists, with the operands in a column of their own."""
    return f"{_WORDS[type(instruction)]:<{_WIDTH}}{_operands(instruction)}".rstrip()


def _operands(instruction: ins.Instruction) -> str:
    match instruction:
        case ins.Load(buffer) | ins.Output(buffer) | ins.Send(buffer) | ins.Receive(buffer):
            return str(buffer)
        case ins.Stash(buffer) | ins.Pop(buffer) | ins.Free(buffer):
            return str(buffer)
        case ins.Forward(keeps=keeps, again=again):
            return _place(instruction) + (" keep" if keeps else "") + (" again" if again else "")
        case ins.Recompute() | ins.Backward() | ins.InputGrad() | ins.WeightGrad():
            return _place(instruction)
        case ins.Run(kind, stage, None, version, batch):
            return f"{kind} s{stage}{batch_mark(batch)} v{version}"
        case ins.Run(kind):
            return f"{kind} {_place(instruction)}"
        case ins.Norm(stage, batch) | ins.Clip(stage, batch):
            return f"s{stage}{batch_mark(batch)}"
        case ins.Update(stage, reads, writes, batch):
            return f"s{stage}{batch_mark(batch)} v{reads} -> v{writes}"
        case ins.Barrier() | ins.Pause():
            return ""
        case _:
            assert_never(instruction)


def _place(
    task: ins.Forward | ins.Recompute | ins.Backward | ins.InputGrad | ins.WeightGrad | ins.Run,
) -> str:
    """``s1[2] v0``; ``s1[2'] v-1`` for the batch before and the version before."""
    return f"s{task.stage}[{task.microbatch}{batch_mark(task.batch)}] v{task.version}"


def parse_instruction(scan: Scanner) -> ins.Instruction:
    """Read an instruction; what follows it on the line is left. Raises ParseError."""
    start = scan.at
    word = scan.need(_WORD, "an instruction such as 'forward s0[0] v0 keep'")
    if word not in ins.OPCODES:
        raise scan.error(f"there is no instruction {word!r}: {near(word, ins.OPCODES)}", start)
    return _parse(word, scan)


def _parse(word: str, scan: Scanner) -> ins.Instruction:
    match word:
        case "barrier":
            return ins.Barrier()
        case "pause":
            return ins.Pause()
        case "update":
            stage = _numbered(scan, "s", "a stage such as s0")
            batch = _batch(scan)
            reads = _version(scan)
            scan.gap("'->'")
            scan.literal("->")
            return ins.Update(stage, reads, _version(scan), batch)
        case "forward":
            stage, i, batch, version = _task(scan)
            keeps, again = _flag(scan, "keep"), _flag(scan, "again")
            return ins.Forward(stage, i, version, batch, keeps, again)
        case "run":
            return _run(scan)
        case "norm" | "clip":
            stage = _numbered(scan, "s", "a stage such as s0")
            return (ins.Norm if word == "norm" else ins.Clip)(stage, _batch(scan))
    if word in _HALVES:
        stage, i, batch, version = _task(scan)
        return _HALVES[word](stage, i, version, batch)
    scan.gap("a buffer such as act:x:0->1[0]")
    return _MOVES[word](parse_buffer(scan))


def _task(scan: Scanner) -> tuple[int, int, int, int]:
    """Stage, micro-batch, batch and version: ``s1[2] v0``."""
    stage = _numbered(scan, "s", "a stage and a micro-batch such as s0[0]")
    i, batch = _index(scan)
    return stage, i, batch, _version(scan)


def _run(scan: Scanner) -> ins.Run:
    scan.gap("the letter of a kind of task")
    kind = scan.need(_WORD, "the letter of a kind of task")
    stage = _numbered(scan, "s", "a stage such as s0, or with a micro-batch s0[0]")
    if scan.text.startswith("[", scan.at):
        i, batch = _index(scan)
        return ins.Run(kind, stage, i, _version(scan), batch)
    batch = _batch(scan)
    return ins.Run(kind, stage, None, _version(scan), batch)


def _flag(scan: Scanner, word: str) -> bool:
    if scan.ended():
        return False
    if not scan.text[scan.at - 1].isspace():
        raise scan.error("expected a blank or the end of the line")
    if (word == "keep" and scan.starts("again")) or scan.comes(STARTS):
        return False
    scan.need(re.compile(rf"{word}\b"), f"'{word}' or the end of the line")
    return True


def _version(scan: Scanner) -> int:
    """``v0``, or ``v-1`` for the version before."""
    what = "a version such as v0"
    scan.gap(what)
    scan.literal("v", what)
    sign = -1 if scan.take(_MINUS) else 1
    return sign * scan.number(what)


def parse_buffer(scan: Scanner) -> Buffer:
    """Read ``act:relu:0->1[2]`` or ``saved:1[2]``. Raises ParseError."""
    kind = cast(BufferKind, scan.need(_KIND, "a buffer such as act:x:0->1[0] or saved:0[0]")[:-1])
    if kind in KEPT:
        stage = scan.number("a stage")
        return Buffer(kind, "", stage, stage, *_index(scan))
    start = scan.at
    value = scan.need(_WORD, "the name of a value")
    if not is_name(value):
        raise scan.error(f"{value!r} is no name of a value", start)
    scan.literal(":")
    source = _stage(scan)
    scan.literal("->")
    return Buffer(kind, value, source, _stage(scan), *_index(scan))


def _stage(scan: Scanner) -> int:
    return HOST if scan.take(_HOST) else scan.number("a stage's number or 'host'")


def _index(scan: Scanner) -> tuple[int, int]:
    """Micro-batch and batch: ``[2]``, ``[2']``."""
    scan.literal("[", "a micro-batch such as [0]")
    index = scan.number("a micro-batch")
    batch = _batch(scan)
    scan.literal("]")
    return index, batch


def _batch(scan: Scanner) -> int:
    marks = scan.take(_BATCH) or ""
    return len(marks) if marks.startswith("+") else -len(marks)


def _numbered(scan: Scanner, letter: str, what: str) -> int:
    scan.gap(what)
    scan.literal(letter, what)
    return scan.number(what)
