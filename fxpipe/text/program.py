"""A program as text: a header, places, passes, edges, and the instructions of each device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast, get_args

from fxpipe.errors import ParseError, near
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import COMPUTE, Event, Launch
from fxpipe.ir.program import Program
from fxpipe.ir.value import COPIED, HOST, KEPT, Buffer, BufferKind, Edge, batch_mark
from fxpipe.text.scan import Line, end_of, is_name, lines_of, print_title
from fxpipe.text.schedule import parse_place, print_place

_HEADER = "a header such as: program 1f1b microbatches=4"
_COLUMN = 35
_DEVICE = "'device' and its number, such as device 0"


def print_program(program: Program) -> str:
    """The text that ``parse_program`` reads back to an equal value::

    program 1f1b microbatches=4
    place 0 | 1
    passes lower communicate
    edge in x host->0
    edge act relu 0->1 gradient
    device 0
      load      in:x:host->0[0]
      forward   s0[0] v0 keep
      send      act:relu:0->1[0]

    With several replicas the header ends with their number, such as ``replicas=2``.
    On devices with streams a line goes on with how its instruction is launched, such as
    ``stream=in0 wait=e3,e7 record=e8``. What stands on no other stream is on ``compute``.
    """
    return "\n".join(_lines(program)) + "\n"


def _lines(program: Program) -> Iterator[str]:
    replicas = f" replicas={program.replicas}" if program.replicas != 1 else ""
    yield f"program {print_title(program.name)} microbatches={program.microbatches}{replicas}"
    yield print_place(program.placement, program.copies, program.devices)
    yield " ".join(["passes", *map(print_title, program.passes)])
    for edge in program.edges:
        yield f"edge {edge}"
    for device, list_ in enumerate(program.lists):
        yield f"device {device}"
        if not program.launches:
            yield from [f"  {_column(instruction)}" for instruction in list_]
            continue
        for instruction, launch in zip(list_, program.launches[device], strict=True):
            yield f"  {_column(instruction):<{_COLUMN}} {_print_launch(launch)}".rstrip()


def _print_launch(launch: Launch) -> str:
    """``stream=in0 wait=e3,e7' record=e8``; nothing for one that only computes."""
    parts = []
    if launch.stream != COMPUTE:
        parts.append(f"stream={launch.stream}")
    if launch.waits:
        parts.append(f"wait={','.join(map(str, launch.waits))}")
    if launch.record is not None:
        parts.append(f"record={launch.record}")
    return " ".join(parts)


def parse_program(text: str) -> Program:
    """Read a program. Comments (``# …``) and blank lines are left out.

    Raises:
        ParseError: with the line and the column of the first thing that is wrong.
    """
    lines = lines_of(text)
    end = end_of(lines)
    rest = iter([line for line in lines if not line.ended()])
    name, microbatches, replicas = _header(next(rest, end))
    held, placement, copies = parse_place(next(rest, end))
    passes = tuple(_passes(next(rest, end)))
    edges: list[Edge] = []
    lists: list[list[ins.Instruction]] = []
    launches: list[list[Launch]] = []
    for line in rest:
        if not lists and line.starts("edge"):
            edges.append(_edge(line))
        elif not lists or line.text.startswith("device", line.at):
            lists.append([])
            launches.append([])
            _device(line, len(lists) - 1, len(held))
        else:
            lists[-1].append(_instruction(line))
            launches[-1].append(_launch(line))
    if len(lists) < len(held):
        raise end.error(f"device {len(lists)} has no list; add 'device {len(lists)}'")
    launched = "streams" in passes or any(launch != Launch() for own in launches for launch in own)
    return Program(
        name,
        microbatches,
        placement,
        tuple(edges),
        tuple(map(tuple, lists)),
        passes,
        tuple(map(tuple, launches)) if launched else (),
        replicas,
        copies,
    )


def _header(line: Line) -> tuple[str, int, int]:
    line.literal("program", _HEADER)
    line.gap("a name")
    name = line.title("the schedule's name")
    line.gap("'microbatches=' and a count")
    line.literal("microbatches=", "'microbatches=' and a count")
    microbatches = line.integer("a count after 'microbatches='")
    replicas = 1
    if not line.ended():
        if not line.text[line.at - 1].isspace():
            raise line.error("expected a blank or the end of the line")
        line.literal("replicas=", "'replicas=' and a count, or the end of the line")
        replicas = line.integer("a count after 'replicas='")
    line.end()
    return name, microbatches, replicas


def _passes(line: Line) -> Iterator[str]:
    line.literal("passes", "'passes' and the names of the passes that are done")
    while not line.ended():
        if not line.text[line.at - 1].isspace():
            raise line.error("expected a blank")
        yield line.title("the name of a pass")


def _edge(line: Line) -> Edge:
    line.literal("edge")
    line.gap("an edge such as act x 0->1")
    return parse_edge(line.text[line.at :].partition("#")[0], line.number, line.at + 1)


def _device(line: Line, expected: int, devices: int) -> None:
    """The line before a device's list; the devices come in order."""
    line.literal("device", _DEVICE)
    line.gap("its number")
    start = line.at
    device = line.integer("its number")
    if device >= devices:
        raise line.error(f"there is no device {device}; the places name {devices} devices", start)
    if device != expected:
        raise line.error(f"expected device {expected}; each device has one list, in order", start)
    line.end()


_EDGE = "write an edge as 'act relu_3 0->1 gradient' or 'in x host->0'"
_PART = re.compile(r"[^ \t\r]+")
_ENDS = re.compile(r"(host|0|[1-9][0-9]{0,8})->(host|0|[1-9][0-9]{0,8})")


def parse_edge(text: str, line: int, column: int) -> Edge:
    """Read one edge as ``str(edge)`` gives it; plans and programs both hold edges.

    Args:
        text: the edge and nothing else; spaces around it are allowed.
        line: where ``text`` stands, for errors.
        column: the column of its first character, from 1.

    Raises:
        ParseError: with the place of the first wrong word.
    """
    words = [(match[0], column + match.start()) for match in _PART.finditer(text)]
    if len(words) < 3:
        raise ParseError(f"an edge has a kind, a value and its ends; {_EDGE}", line, column)
    (kind, kind_at), (value, value_at), (ends, ends_at) = words[:3]
    if kind not in ("in", "act", "skip", "out"):
        raise ParseError(f"{kind!r} is no kind of edge; {_EDGE}", line, kind_at)
    if not is_name(value):
        raise ParseError(f"{value!r} is no name of a value; {_EDGE}", line, value_at)
    match = _ENDS.fullmatch(ends)
    if match is None:
        raise ParseError(f"{ends!r} are no ends of an edge; {_EDGE}", line, ends_at)
    gradient = len(words) > 3 and words[3][0] == "gradient"
    if len(words) > 3 + gradient:
        word, at = words[3 + gradient]
        raise ParseError(f"unexpected {word!r} after the edge; {_EDGE}", line, at)
    source, target = (HOST if end == "host" else int(end) for end in match.groups())
    edge = Edge(source, target, value, gradient)
    if edge.kind != kind:
        raise ParseError(f"an edge {ends} is of kind {edge.kind!r}, not {kind!r}", line, kind_at)
    return edge


_WORD = re.compile(r"\w+")
_HOST = re.compile(r"host\b")
_KIND = re.compile(rf"({'|'.join(get_args(BufferKind))}):")
_MARKS = re.compile(r"'+|\++")
_MINUS = re.compile(r"-")
_COMMA = re.compile(r",")
_STREAM = re.compile(r"[a-z]+[0-9]*")
_EVENT = "an event such as e3"
_LAUNCH = {word: re.compile(rf"(?<=[ \t\r]){word}=") for word in ("stream", "wait", "record")}
_FLAGS = {word: re.compile(rf"{word}\b") for word in ("keep", "again", "rest")}


def _batch(line: Line) -> int:
    marks = line.take(_MARKS) or ""
    return len(marks) if marks.startswith("+") else -len(marks)


def _index(line: Line) -> tuple[int, int]:
    """Micro-batch and batch: ``[2]``, ``[2']``."""
    line.literal("[", "a micro-batch such as [0]")
    index = line.integer("a micro-batch")
    batch = _batch(line)
    line.literal("]")
    return index, batch


def _stage(line: Line, what: str = "a stage such as s0") -> int:
    line.gap(what)
    line.literal("s", what)
    return line.integer(what)


def _version(line: Line) -> int:
    """``v0``, or ``v-1`` for the version before."""
    what = "a version such as v0"
    line.gap(what)
    line.literal("v", what)
    sign = -1 if line.take(_MINUS) else 1
    return sign * line.integer(what)


def _of_task(line: Line) -> tuple[int, int, int]:
    return _stage(line, "a stage and a micro-batch such as s0[0]"), *_index(line)


def _of_own(line: Line) -> tuple[str, int, int | None, int]:
    line.gap("the letter of a kind of task")
    kind = line.need(_WORD, "the letter of a kind of task")
    stage = _stage(line, "a stage such as s0, or with a micro-batch s0[0]")
    if line.text.startswith("[", line.at):
        return kind, stage, *_index(line)
    return kind, stage, None, _batch(line)


def _change(line: Line) -> tuple[int, int]:
    reads = _version(line)
    line.gap("'->'")
    line.literal("->")
    return reads, _version(line)


def _bucket(line: Line) -> int:
    line.gap("'bucket' and its number")
    line.literal("bucket", "'bucket' and its number")
    line.gap("its number")
    return line.integer("the number of a bucket")


def _flag(line: Line, word: str) -> bool:
    if line.ended():
        return False
    if not line.text[line.at - 1].isspace():
        raise line.error("expected a blank or the end of the line")
    others = ("again", "stream=", "wait=", "record=") if word == "keep" else tuple(_LAUNCH)
    if line.text.startswith(others, line.at):
        return False
    line.need(_FLAGS[word], f"'{word}' or the end of the line")
    return True


def _buffer(line: Line) -> Buffer:
    """``act:relu:0->1[2]`` or ``saved:1[2]``."""
    line.gap("a buffer such as act:x:0->1[0]")
    kind = cast(BufferKind, line.need(_KIND, "a buffer such as act:x:0->1[0] or saved:0[0]")[:-1])
    if kind in (*KEPT, *COPIED):
        stage = line.integer("a stage")
        return Buffer(kind, "", stage, stage, *_index(line))
    start = line.at
    value = line.need(_WORD, "the name of a value")
    if not is_name(value):
        raise line.error(f"{value!r} is no name of a value", start)
    line.literal(":")
    source = _end(line)
    line.literal("->")
    return Buffer(kind, value, source, _end(line), *_index(line))


def _end(line: Line) -> int:
    return HOST if line.take(_HOST) else line.integer("a stage's number or 'host'")


class _Form(NamedTuple):
    """Some fields of an instruction, how they are printed together, and how they are read."""

    fields: tuple[str, ...]
    text: Callable[[Any], str]
    read: Callable[[Line], tuple[Any, ...]]


_BUFFER = _Form(("buffer",), lambda x: str(x.buffer), lambda line: (_buffer(line),))
_TASK = _Form(
    ("stage", "microbatch", "batch"),
    lambda x: f"s{x.stage}[{x.microbatch}{batch_mark(x.batch)}]",
    _of_task,
)
_ONCE = _Form(
    ("stage", "batch"),
    lambda x: f"s{x.stage}{batch_mark(x.batch)}",
    lambda line: (_stage(line), _batch(line)),
)
_COPY = _Form(
    ("stage", "copy", "batch"),
    lambda x: f"s{x.stage}[{x.copy}{batch_mark(x.batch)}]",
    _of_task,
)
_OWN = _Form(
    ("kind", "stage", "microbatch", "batch"),
    lambda x: f"{x.kind} {(_ONCE if x.microbatch is None else _TASK).text(x)}",
    _of_own,
)
_VERSION = _Form(("version",), lambda x: f"v{x.version}", lambda line: (_version(line),))
_KEEP = _Form(("keeps",), lambda x: "keep" * x.keeps, lambda line: (_flag(line, "keep"),))
_AGAIN = _Form(("again",), lambda x: "again" * x.again, lambda line: (_flag(line, "again"),))
_REST = _Form(("rest",), lambda x: "rest" * x.rest, lambda line: (_flag(line, "rest"),))
_BUCKET = _Form(("bucket",), lambda x: f"bucket {x.bucket}", lambda line: (_bucket(line),))
_CHANGE = _Form(("reads", "writes"), lambda x: f"v{x.reads} -> v{x.writes}", _change)

_FORMS: dict[str, tuple[_Form, ...]] = {
    **dict.fromkeys(("load", "output", "send", "recv", "stash", "pop", "free"), (_BUFFER,)),
    **dict.fromkeys(("offload", "prefetch", "await"), (_BUFFER,)),
    **dict.fromkeys(("recompute", "input_grad"), (_TASK, _VERSION)),
    **dict.fromkeys(("backward", "weight_grad"), (_TASK, _VERSION, _REST)),
    "partial_backward": (_OWN, _VERSION, _BUCKET),
    **dict.fromkeys(("reduce_scatter", "all_gather", "take_part"), (_ONCE,)),
    **dict.fromkeys(("gather_weights", "norm", "clip", "share", "add"), (_ONCE,)),
    "give": (_COPY,),
    **dict.fromkeys(("barrier", "pause"), ()),
    "forward": (_TASK, _VERSION, _KEEP, _AGAIN),
    "run": (_OWN, _VERSION),
    "update": (_ONCE, _CHANGE),
}
"""Opcode → what stands behind it on its line."""

_WORDS = {made: word for word, made in ins.OPCODES.items()}
_WIDTH = 12
"""Of the column of words; what stands behind a longer one begins further to the right."""


def print_instruction(instruction: ins.Instruction) -> str:
    """An instruction in one line, for messages: ``forward s1[2] v0 keep``."""
    word = _WORDS[type(instruction)]
    return " ".join([word, *filter(None, [form.text(instruction) for form in _FORMS[word]])])


def _column(instruction: ins.Instruction) -> str:
    """The same for lists, with the operands in a column of their own."""
    word, _, operands = print_instruction(instruction).partition(" ")
    return f"{word:<{_WIDTH}} {operands}".rstrip()


def _instruction(line: Line) -> ins.Instruction:
    """Read an instruction; what follows it on the line is left."""
    start = line.at
    word = line.need(_WORD, "an instruction such as 'forward s0[0] v0 keep'")
    made = ins.OPCODES.get(word)
    if made is None:
        raise line.error(f"there is no instruction {word!r}: {near(word, ins.OPCODES)}", start)
    values: dict[str, Any] = {}
    for form in _FORMS[word]:
        values.update(zip(form.fields, form.read(line), strict=True))
    return made(**values)


def _launch(line: Line) -> Launch:
    """The rest of a line, to its end."""
    if line.ended():
        return Launch()
    stream, waits, record = COMPUTE, [], None
    if _comes(line, "stream"):
        stream = line.need(_STREAM, "a stream such as in0")
    if _comes(line, "wait"):
        waits.append(_event(line))
        while line.take(_COMMA):
            waits.append(_event(line))
    if _comes(line, "record"):
        record = _event(line)
    line.end()
    return Launch(stream, tuple(waits), record)


def _comes(line: Line, word: str) -> bool:
    """Whether ``word=`` comes next, behind a blank; it is read."""
    return not line.ended() and line.take(_LAUNCH[word]) is not None


def _event(line: Line) -> Event:
    line.literal("e", _EVENT)
    return Event(line.integer(_EVENT), _batch(line))
