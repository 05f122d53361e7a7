"""Draws programs: devices as rows, time to the right, transfers as arrows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from fxpipe.errors import Fault
from fxpipe.extensions.draw.canvas import ArrowStyle, BoxStyle, Canvas, Point, text_width
from fxpipe.extensions.draw.chart import (
    FAULTY,
    NEVER,
    WAITING,
    Chart,
    FaultMarks,
    LegendEntry,
    fault_entries,
    faults_of,
    number_faults,
)
from fxpipe.extensions.draw.picture import FAINT, IDLE, Picture
from fxpipe.extensions.draw.schedule import draw_simulations, row_label
from fxpipe.extensions.draw.styles import (
    MARK_HEIGHT,
    InstructionStyle,
    arrow,
    arrow_entries,
    instruction_style,
)
from fxpipe.extensions.draw.timeline import Bar, Timeline, sketch
from fxpipe.extensions.simulator.simulate import share_of, simulate
from fxpipe.formatting import plural
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import COMPUTE
from fxpipe.ir.program import Program
from fxpipe.ir.walk import Place, Wait, usual_cost, waits_of
from fxpipe.text.program import print_instruction

DETAILED = 600
"""The most instructions that are all drawn; of a larger program its simulation is."""

_UNIT, _MARK, _MARK_BOX = 28.0, 8.5, 7.5
"""The least width, in points, of a unit of time, a mark and a mark's box."""

_LABEL, _MARK_LABEL = 9.0, 6.5
_AIR = 3.0

WAIT_ARROW = ArrowStyle(FAINT, "dotted")


class Row(NamedTuple):
    """A device or one of its streams, with its positions in the device's list.

    ``stream`` is "" if the device runs one instruction after another.
    """

    device: int
    stream: str
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """All rows of a program's picture.

    Attributes:
        rows: the rows from top to bottom.
        at: (device, position in its list) → (row, position in the row).
        waits: place in the rows → the places that record the events it waits for.
    """

    rows: tuple[Row, ...]
    at: dict[Place, Place]
    waits: dict[Place, list[Place]]


def program_rows(program: Program) -> Rows:
    """Return the rows of a program: each device's compute stream first, then the others by name."""
    rows: list[Row] = []
    for device, instructions in enumerate(program.lists):
        if not program.launches:
            rows.append(Row(device, "", tuple(range(len(instructions)))))
            continue
        streams = [launch.stream for launch in program.launches[device]]
        for stream in sorted({COMPUTE, *streams}, key=lambda name: (name != COMPUTE, name)):
            positions = tuple(at for at, name in enumerate(streams) if name == stream)
            rows.append(Row(device, stream, positions))
    at = {
        Place(row.device, position): Place(number, index)
        for number, row in enumerate(rows)
        for index, position in enumerate(row.positions)
    }
    launched = [
        (at[Place(device, position)], launch)
        for device, launches in enumerate(program.launches)
        for position, launch in enumerate(launches)
    ]
    recorded = {launch.record: place for place, launch in launched if launch.record is not None}
    # Events that no launch here records belong to earlier steps, which are done.
    waits = {
        place: [recorded[event] for event in launch.waits if event in recorded]
        for place, launch in launched
        if launch.waits
    }
    return Rows(tuple(rows), at, waits)


def sketch_program(program: Program, rows: Rows, mark: float) -> Timeline[ins.Instruction]:
    """Return when the instructions of a program run; the program need not be valid.

    On streams a receive waits for events, not for the send, which only passes a reference on.
    An instruction that computes nothing takes the time ``mark``.
    """
    lists = [[program.lists[row.device][at] for at in row.positions] for row in rows.rows]
    waits: list[list[Wait]] = [[] for _ in lists]
    for device, device_waits in enumerate(waits_of(program)):
        for position, *on in device_waits:
            x = program.lists[device][position]
            if not program.launches or isinstance(x, ins.Meeting):
                row, index = rows.at[Place(device, position)]
                waits[row].append((index, *rows.at[Place(*on)]))
    for (row, index), sources in rows.waits.items():
        waits[row] += [(index, *source) for source in sources]
    for row_waits in waits:
        row_waits.sort()

    def cost(x: ins.Instruction) -> float:
        return mark if x.letter is None else usual_cost(x) * share_of(x, program)

    return sketch(lists, cost, waits)


_Box = tuple[Bar[ins.Instruction], str]
"""An instruction and the name of its box."""


def draw_program(program: Program, *, faults: Sequence[Fault] | None = None) -> Picture:
    """Draw the order of all instructions, with transfers that take no time.

    The picture shows every instruction, and so is not to scale. Faults of an invalid program are
    red: a number over each instruction at fault, and the list below. Of a large program without
    faults the simulation is drawn, its tasks to scale.

    Args:
        program: the program.
        faults: the faults to mark; by default those that the verifier finds.
    """
    found = faults_of(program) if faults is None else faults
    if sum(map(len, program.lists)) > DETAILED and not found:
        return draw_simulations(simulate(program))
    unit = _unit(program)
    rows = program_rows(program)
    marks = _in_rows(number_faults(found), rows)
    timeline = sketch_program(program, rows, _MARK / unit)
    spans = (*timeline.spans, *timeline.unrun)
    chart = Chart(
        Canvas("program"),
        _title(program, timeline, marks),
        [marks.label(at, _row_label(program, row)) for at, row in enumerate(rows.rows)],
        timeline.end or 1.0,
        unit,
        gap=0.9,
        wrong=marks.rows,
    )
    drawn_at: dict[Place, _Box] = {}
    stuck = set(timeline.stuck)
    for number, span in enumerate(spans):
        drawn = instruction_style(span.task, program)
        place = Place(span.device, span.position)
        runs = number < len(timeline.spans)
        if not runs:
            drawn = replace(drawn, look=WAITING if span in stuck else NEVER)
        if place in marks.at:
            drawn = replace(drawn, look=replace(FAULTY, fill=drawn.look.fill))
        node = _draw(chart, span, drawn, unit)
        marks.number(chart, place, chart.x(span.start))
        if runs:
            drawn_at[place] = span, node
    _draw_transfers(chart, list(drawn_at.values()))
    waits = _draw_waits(chart, drawn_at, rows)
    entries = _box_entries(program)
    sent = (x.buffer.kind for x in chain(*program.lists) if isinstance(x, ins.Sending))
    entries += arrow_entries(set(sent))
    if waits:
        entries.append(LegendEntry("waits for an event", WAIT_ARROW))
    entries += fault_entries(marks, stuck=bool(timeline.unrun))
    below = chart.legend(chart.bottom + 10, entries)
    marks.list(chart, below)
    return chart.canvas.picture


def _unit(program: Program) -> float:
    """The width in points of a unit of time: labels of forwards fit."""
    labels = {
        instruction_style(x, program).label
        for x in chain(*program.lists)
        if isinstance(x, ins.Forward)
    }
    return max([_UNIT, *(text_width(label, _LABEL) + _AIR for label in labels)])


def _draw(chart: Chart, span: Bar[ins.Instruction], drawn: InstructionStyle, unit: float) -> str:
    """Draw an instruction; returns its node."""
    corner = (chart.x(span.start), chart.y(span.device))
    size, width = _MARK_LABEL, _MARK_BOX
    if not drawn.mark:
        width = (span.end - span.start) * unit
        size = min(_LABEL, (width - 1) / text_width(drawn.label, 1))
    height = drawn.height * chart.row_height
    aside = (_MARK - _MARK_BOX) / 2 if drawn.mark else 0.0
    return chart.canvas.box(
        (corner[0] + aside, corner[1] + (chart.row_height - height) / 2),
        width,
        height,
        drawn.look,
        label=drawn.label,
        size=size,
        tooltip=print_instruction(span.task),
    )


def _draw_transfers(chart: Chart, boxes: Sequence[_Box]) -> None:
    """Draw an arrow from each send or stash to the receive or pop of the same buffer."""
    first: dict[ins.Instruction, _Box] = {}
    for box in boxes:
        first.setdefault(box[0].task, box)
    for instruction, (span, tail) in first.items():
        match instruction:
            case ins.Send(buffer):
                arrival: ins.Instruction = ins.Receive(buffer)
            case ins.Stash(buffer):
                arrival = ins.Pop(buffer)
            case _:
                continue
        if arrival in first:
            target, head = first[arrival]
            path = _path(chart, span, target)
            chart.canvas.arrow(tail, head, path, arrow(buffer.kind), tooltip=str(buffer))


def _path(chart: Chart, source: Bar[ins.Instruction], target: Bar[ins.Instruction]) -> list[Point]:
    """The arrow's path from mark to mark."""
    inset = chart.row_height * (1 - MARK_HEIGHT) / 2
    x1, x2 = chart.x(source.start) + _MARK / 2, chart.x(target.start) + _MARK / 2
    if source.device == target.device:
        y = chart.y(source.device) + inset
        return _bent((x1, y), (x2, y), y - chart.row_height * 0.7)
    return _bent(*chart.ends(source.device, x1, target.device, x2, inset))


def _bent(start: Point, stop: Point, height: float | None = None) -> list[Point]:
    """A curve with vertical ends that bends halfway, or at the y ``height``."""
    bend = (start[1] + stop[1]) / 2 if height is None else height
    return [start, (start[0], bend), (stop[0], bend), stop]


def _draw_waits(chart: Chart, drawn: dict[Place, _Box], rows: Rows) -> bool:
    """Draw an arrow from each record of an event to its waits on other rows; returns whether there
    are any."""
    pairs = [
        (drawn[source], drawn[target])
        for target, sources in rows.waits.items()
        for source in sources
        if source in drawn and target in drawn and source.device != target.device
    ]
    for (before, tail), (after, head) in pairs:
        x1, x2 = chart.x(before.end), chart.x(after.start)
        path = _bent(*chart.ends(before.device, x1, after.device, x2))
        chart.canvas.arrow(tail, head, path, WAIT_ARROW)
    return bool(pairs)


def _in_rows(marks: FaultMarks, rows: Rows) -> FaultMarks:
    """Move the marks from devices to the picture's rows, those of a whole device to its first."""
    first: dict[int, int] = {}
    for at, row in enumerate(rows.rows):
        first.setdefault(row.device, at)
    return FaultMarks(
        marks.faults,
        {rows.at.get(place, Place(-1, -1)): numbers for place, numbers in marks.at.items()},
        {first[device]: numbers for device, numbers in marks.rows.items() if device in first},
    )


def _row_label(program: Program, row: Row) -> str:
    label = row_label(program, row.device)
    return f"{label} · {row.stream}" if row.stream else label


def _title(program: Program, timeline: Timeline[ins.Instruction], marks: FaultMarks) -> str:
    parts = [
        f"program of {program.name}",
        f"p = {program.devices}",
        f"m = {program.microbatches}",
        plural(sum(map(len, program.lists)), "instruction"),
    ]
    if timeline.stuck:
        parts.append(f"STUCK: {len(timeline.unrun)} never run")
    if marks.faults:
        parts.append(marks.count)
    return " · ".join(parts)


def _box_entries(program: Program) -> list[LegendEntry]:
    """The legend entries for the opcodes of the program."""
    examples: dict[type[ins.Instruction], ins.Instruction] = {}
    for instruction in chain(*program.lists):
        examples.setdefault(type(instruction), instruction)
    entries: list[LegendEntry] = []
    for word, kind in ins.every_opcode().items():
        if kind in examples:
            drawn = instruction_style(examples[kind], program)
            look = drawn.look if drawn.mark else replace(drawn.look, border=FAINT)
            label = drawn.label if drawn.mark else drawn.label[0]
            entries.append(LegendEntry(word, look, label))
    return [*entries, LegendEntry("idle", BoxStyle(IDLE, FAINT))]
