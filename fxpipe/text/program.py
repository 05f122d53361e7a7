"""Print and parse programs: a header, places, passes, edges, and each device's instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fxpipe.errors import near
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import COMPUTE, Event, Launch
from fxpipe.ir.program import Program
from fxpipe.ir.value import BETWEEN, COPIED, OWN, Buffer, Edge, stage_name
from fxpipe.text.form import Form, options
from fxpipe.text.scan import Line, end_of, lines_of, print_title
from fxpipe.text.schedule import parse_place, print_place

_COLUMN = 35


def print_program(program: Program) -> str:
    """Print a program as text that ``parse_program`` reads back to an equal value::

    program 1f1b microbatches=4
    place 0 | 1
    passes lower communicate
    edge in x host->0
    edge act relu 0->1
    edge grad relu 1->0
    device 0
      load      in:x:host->0[0]
      forward   s0[0] v0 keep
      send      act:relu:0->1[0]

    With several replicas, the header ends with their number, such as ``replicas=2``. On devices
    with streams, a line ends with how its instruction is launched, such as
    ``stream=in0 wait=e3,e7 record=e8``; the default stream is ``compute``.
    """
    return "\n".join(_lines(program)) + "\n"


def _lines(program: Program) -> Iterator[str]:
    replicas = f" replicas={program.replicas}" if program.replicas != 1 else ""
    yield _HEADER.text(program) + replicas
    yield print_place(program.placement, program.copies, program.devices)
    yield " ".join(["passes", *map(print_title, program.passes)])
    for edge in (*program.edges, *program.gradients):
        yield f"edge {edge}"
    for device in range(program.devices):
        yield from list_lines(program, device)


def list_lines(program: Program, device: int) -> Iterator[str]:
    """The lines of a device."""
    yield f"device {device}"
    if not program.launches:
        yield from [f"  {_column(instruction)}" for instruction in program.lists[device]]
        return
    for instruction, launch in zip(program.lists[device], program.launches[device], strict=True):
        yield f"  {_column(instruction):<{_COLUMN}} {_print_launch(launch)}".rstrip()


def _print_launch(launch: Launch) -> str:
    """Print ``stream=in0 wait=e3,e7' record=e8``, without the parts that have defaults."""
    parts = []
    if launch.stream != COMPUTE:
        parts.append(f"stream={launch.stream}")
    if launch.waits:
        parts.append(f"wait={','.join(map(str, launch.waits))}")
    if launch.record is not None:
        parts.append(f"record={launch.record}")
    return " ".join(parts)


def parse_program(text: str) -> Program:
    """Read a program. Comments (``# …``) and blank lines are ignored.

    Raises:
        ParseError: with the line and column of the first error.
    """
    lines = lines_of(text)
    end = end_of(lines)
    rest = iter([line for line in lines if not line.ended()])
    header = next(rest, end)
    fields = _HEADER.read(header)
    for _ in options(header, "replicas="):
        fields["replicas"] = header.integer("a number after 'replicas='")
    held, placement, copies = parse_place(next(rest, end))
    passes = tuple(_passes(next(rest, end)))
    edges: list[Edge] = []
    lists: list[list[ins.Instruction]] = []
    launches: list[list[Launch]] = []
    for line in rest:
        if not lists and line.starts("edge"):
            edges.append(read_edge(line))
        elif not lists or line.text.startswith("device", line.at):
            lists.append([])
            launches.append([])
            _device(line, len(lists) - 1, len(held))
        else:
            instruction, launch = _instruction(line)
            lists[-1].append(instruction)
            launches[-1].append(launch)
    if len(lists) < len(held):
        raise end.error(f"device {len(lists)} has no list; add 'device {len(lists)}'")
    launched = "streams" in passes or any(launch != Launch() for row in launches for launch in row)
    return Program(
        **fields,
        placement=placement,
        edges=tuple(edge for edge in edges if not edge.gradient),
        gradients=tuple(edge for edge in edges if edge.gradient),
        lists=tuple(map(tuple, lists)),
        passes=passes,
        launches=tuple(map(tuple, launches)) if launched else (),
        copies=copies,
    )


def _passes(line: Line) -> Iterator[str]:
    line.literal("passes", "'passes' and the names of the passes that are done")
    while line.more():
        yield line.title("the name of a pass")


def _device(line: Line, expected: int, devices: int) -> None:
    """Read the line before a device's list; the devices come in order."""
    line.literal("device", "'device' and its number, such as device 0")
    line.gap("its number")
    start = line.at
    device = line.integer("its number")
    if device >= devices:
        raise line.error(f"there is no device {device}; the places name {devices} devices", start)
    if device != expected:
        raise line.error(f"expected device {expected}; each device has one list, in order", start)
    line.end()


def read_edge(line: Line) -> Edge:
    """Read the word ``edge`` and an edge as ``str(edge)`` prints it, up to the end of the line.

    Raises:
        ParseError: with the line and column of the error.
    """
    line.literal("edge")
    line.gap(f"an edge such as {_EDGE.example}")
    start = line.at
    fields = _EDGE.read(line)
    line.end()
    kind = fields.pop("kind")
    edge = Edge(**fields, gradient=kind == "grad")
    if edge.kind != kind:
        ends = f"{stage_name(edge.source)}->{stage_name(edge.target)}"
        raise line.error(f"an edge {ends} is of kind {edge.kind!r}, not {kind!r}", start)
    return edge


def _buffer(line: Line) -> Buffer:
    """Read a buffer, such as ``act:relu:0->1[2]`` or ``saved:1[2]``."""
    what = "a buffer such as act:x:0->1[0] or saved:0[0]"
    line.gap(what)
    start = line.at
    kind = line.need(_KIND, what)[:-1]
    if kind not in (*BETWEEN, *OWN, *COPIED) and not _of_extension(kind):
        line.at = start
        raise line.expected(what)
    if kind not in BETWEEN:
        fields = _OWN_BUFFER.read(line)
        stage = fields.pop("stage")
        return Buffer(kind, "", stage, stage, **fields)
    return Buffer(kind, **_BUFFER.read(line))


def _of_extension(kind: str) -> bool:
    made = ins.every_opcode().values()
    return any(kind in each.kinds for each in made if issubclass(each, ins.Move))


_WORD = re.compile(r"\w+")
_KIND = re.compile(r"[a-z]+:")
_STREAM = re.compile(r"[a-z]+[0-9]*")

_HEADER = Form("program {name:title} microbatches={microbatches}", "program 1f1b microbatches=4")
_EDGE = Form("{kind:edge} {value:value} {source:end}->{target:end}", "act x 0->1")
_BUFFER = Form(
    "{value:value}:{source:end}->{target:end}[{microbatch}{batch:batch}]", "act:x:0->1[0]"
)
_OWN_BUFFER = Form("{stage}[{microbatch}{batch:batch}]", "saved:0[0]")
_EVENT = Form("e{number}{batch:batch}", "wait=e3")


def _form(kind: type[ins.Instruction]) -> Form:
    """The form of an instruction's operands, unless they are a buffer."""
    if kind not in _FORMS:
        _FORMS[kind] = Form(*kind.form, **kind.flags)
    return _FORMS[kind]


_FORMS: dict[type, Form] = {}


_WIDTH = 12
"""The width of the column of opcodes; longer ones shift their operands to the right."""


def print_instruction(instruction: ins.Instruction) -> str:
    """Print an instruction for messages: ``forward s1[2] v0 keep``."""
    if isinstance(instruction, ins.Move):
        return f"{instruction.opcode} {instruction.buffer}"
    operands = _form(type(instruction)).text(instruction)
    return f"{instruction.opcode} {operands}".rstrip()


def _column(instruction: ins.Instruction) -> str:
    """Print an instruction for lists, with the operands in a column of their own."""
    word, _, operands = print_instruction(instruction).partition(" ")
    return f"{word:<{_WIDTH}} {operands}".rstrip()


def _instruction(line: Line) -> tuple[ins.Instruction, Launch]:
    """Read an instruction and how it is launched."""
    start = line.at
    word = line.need(_WORD, "an instruction such as 'forward s0[0] v0 keep'")
    kind = ins.find_opcode(word)
    if kind is None:
        raise line.error(
            f"there is no instruction {word!r}: {near(word, ins.every_opcode())}", start
        )
    flags, values, launch = dict[str, str](), dict[str, Any](), dict[str, Any]()
    if issubclass(kind, ins.Move):
        values["buffer"] = _buffer(line)
    elif kind.form[0]:
        form = _form(kind)
        line.gap(f"its operands, as in {form.example}")
        flags, values = form.flags, form.read(line)
    for option in options(line, *flags, "stream=", "wait=", "record="):
        match option:
            case "stream=":
                launch["stream"] = line.need(_STREAM, "a stream such as in0")
            case "wait=":
                waits = [Event(**_EVENT.read(line))]
                while line.skip(","):
                    waits.append(Event(**_EVENT.read(line)))
                launch["waits"] = tuple(waits)
            case "record=":
                launch["record"] = Event(**_EVENT.read(line))
            case flag:
                values[flags[flag]] = True
    return kind(**values), Launch(**launch)
