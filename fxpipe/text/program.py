"""A program as text: a header, places, passes, edges, and the instructions of each device."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.instruction import Instruction
from fxpipe.ir.program import Launch, Program
from fxpipe.ir.value import Edge
from fxpipe.text.edge import parse_edge
from fxpipe.text.instruction import parse_instruction, parse_launch, print_column, print_launch
from fxpipe.text.place import parse_place, placement_of, print_place
from fxpipe.text.scan import Scanner, print_title, scan_lines

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

    On devices with streams a line goes on with how its instruction is launched, such as
    ``stream=in0 wait=e3,e7 record=e8``. What stands on no other stream is on ``compute``.
    """
    return "\n".join(_lines(program)) + "\n"


def _lines(program: Program) -> Iterator[str]:
    yield f"program {print_title(program.name)} microbatches={program.microbatches}"
    yield print_place(program.placement, program.devices)
    yield " ".join(["passes", *map(print_title, program.passes)])
    for edge in program.edges:
        yield f"edge {edge}"
    for device, list_ in enumerate(program.lists):
        yield f"device {device}"
        if not program.launches:
            yield from [f"  {print_column(instruction)}" for instruction in list_]
            continue
        for instruction, launch in zip(list_, program.launches[device], strict=True):
            yield f"  {print_column(instruction):<{_COLUMN}} {print_launch(launch)}".rstrip()


def parse_program(text: str) -> Program:
    """Read a program. Comments (``# …``) and blank lines are left out.

    Raises:
        ParseError: with the line and the column of the first thing that is wrong.
    """
    lines, end = scan_lines(text)
    rest = iter(lines)
    name, microbatches = _header(next(rest, end))
    held = parse_place(next(rest, end))
    passes = tuple(_passes(next(rest, end)))
    edges: list[Edge] = []
    lists: list[list[Instruction]] = []
    launches: list[list[Launch]] = []
    for scan in rest:
        if scan.starts("edge") and not lists:
            edges.append(_edge(scan))
        elif scan.starts("device") or not lists:
            lists.append([])
            launches.append([])
            _device(scan, len(lists) - 1, len(held))
        else:
            lists[-1].append(parse_instruction(scan))
            launches[-1].append(parse_launch(scan))
    if len(lists) < len(held):
        raise end.error(f"device {len(lists)} has no list; add 'device {len(lists)}'")
    launched = "streams" in passes or any(launch != Launch() for own in launches for launch in own)
    return Program(
        name,
        microbatches,
        placement_of(held),
        tuple(edges),
        tuple(map(tuple, lists)),
        passes,
        tuple(map(tuple, launches)) if launched else (),
    )


def _header(scan: Scanner) -> tuple[str, int]:
    scan.literal("program", _HEADER)
    scan.gap("a name")
    name = scan.title("the schedule's name")
    scan.gap("'microbatches=' and a count")
    scan.literal("microbatches=", "'microbatches=' and a count")
    microbatches = scan.number("a count after 'microbatches='")
    scan.end()
    return name, microbatches


def _passes(scan: Scanner) -> Iterator[str]:
    scan.literal("passes", "'passes' and the names of the passes that are done")
    while not scan.ended():
        if not scan.text[scan.at - 1].isspace():
            raise scan.error("expected a blank")
        yield scan.title("the name of a pass")


def _edge(scan: Scanner) -> Edge:
    scan.literal("edge")
    scan.gap("an edge such as act x 0->1")
    return parse_edge(scan.tail(), scan.line, scan.at + 1)


def _device(scan: Scanner, expected: int, devices: int) -> None:
    """The line before a device's list; the devices come in order."""
    scan.literal("device", _DEVICE)
    scan.gap("its number")
    start = scan.at
    device = scan.number("its number")
    if device >= devices:
        raise scan.error(f"there is no device {device}; the places name {devices} devices", start)
    if device != expected:
        raise scan.error(f"expected device {expected}; each device has one list, in order", start)
    scan.end()
