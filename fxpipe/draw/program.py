"""A program as a picture: devices as rows, time to the right, transfers as arrows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxpipe.draw.canvas import Canvas, Look, Point, Stroke, text_width
from fxpipe.draw.chart import Chart, Entry, Fit, fit, row_height
from fxpipe.draw.colours import FAINT, IDLE
from fxpipe.draw.glyph import (
    MARK_HEIGHT,
    Glyph,
    arrow,
    arrow_entries,
    glyph,
)
from fxpipe.draw.lanes import Lane, Lanes, lanes_of, sketch_lanes
from fxpipe.draw.marks import FAULTY, GAP, NEVER, WAITING, Marks, faults_of, mark
from fxpipe.draw.picture import Picture
from fxpipe.draw.schedule import row_label
from fxpipe.draw.timeline import Span, Timeline
from fxpipe.errors import Fault
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer
from fxpipe.ir.walk import Place
from fxpipe.text.instruction import print_instruction

DETAILED = 600
"""The most instructions with every one drawn; a larger program shows only compute and transfers."""

WITH_ARROWS = 6000
"""The most instructions with which transfers are drawn."""

_UNIT, _MARK, _MARK_BOX = 28.0, 8.5, 7.5
"""The least width, in points, of a unit of time, a mark and its box, where marks are drawn."""

_LABEL, _MARK_LABEL = 9.0, 6.5
_AIR = 3.0

_TRANSFERS = (ins.Send, ins.Receive, ins.Stash, ins.Pop)

WAIT_ARROW = Stroke(FAINT, "dotted")

_ASIDE = 2.0
"""Where there are no marks, arrows of gradients are shifted to the right by so much."""


@dataclass(frozen=True)
class _Scale:
    """Which parts of a program are drawn, and how large.

    Attributes:
        fit: the scale of time and labels.
        marks: whether instructions that compute nothing have boxes.
        arrows: whether transfers have arrows.
    """

    fit: Fit
    marks: bool
    arrows: bool


def draw_program(program: Program, *, faults: Sequence[Fault] | None = None) -> Picture:
    """Draw the order of all instructions, with transfers that take no time.

    The picture of a small program has every instruction, and so is not to scale; that of a large
    one has compute, to scale, and transfers. An invalid program is drawn with all its faults in
    red: a number over each instruction at fault, and the list of them below.

    Args:
        program: the program.
        faults: the faults to mark; by default what the verifier finds.
    """
    marks = mark(faults_of(program) if faults is None else faults)
    count = sum(map(len, program.lists))
    unit = _unit(program)
    lanes = lanes_of(program)
    timeline = sketch_lanes(program, lanes, _MARK / unit if count <= DETAILED else 0.0)
    marks = _in_rows(marks, lanes)
    spans = (*timeline.spans, *timeline.unrun)
    glyphs = [glyph(span.task, program) for span in spans]
    end = max((span.end for span in spans), default=0.0) or 1.0
    if count <= DETAILED:
        scale = _Scale(Fit(unit, _LABEL, row_height(len(lanes.rows))), marks=True, arrows=True)
    else:
        boxes = {
            (drawn.label, span.end - span.start)
            for span, drawn in zip(spans, glyphs, strict=True)
            if not drawn.mark
        }
        fitted = fit(boxes, end, row_height(len(lanes.rows)))
        scale = _Scale(fitted, marks=False, arrows=count <= WITH_ARROWS)
    chart = Chart(
        Canvas("program"),
        _title(program, timeline, marks),
        [marks.label(row, _row_label(program, lane)) for row, lane in enumerate(lanes.rows)],
        end,
        scale.fit.scale,
        gap=0.9 if scale.arrows else GAP if marks.faults else 0.2,
        wrong=marks.rows,
    )

    nodes: dict[ins.Instruction, tuple[Span[ins.Instruction], str]] = {}
    drawn_at: dict[Place, tuple[Span[ins.Instruction], str]] = {}
    unrun, stuck = set(timeline.unrun), set(timeline.stuck)
    for span, drawn in zip(spans, glyphs, strict=True):
        place = Place(span.device, span.position)
        if span in unrun:
            drawn = replace(drawn, look=WAITING if span in stuck else NEVER)
        if place in marks.at:
            drawn = replace(drawn, look=replace(FAULTY, fill=drawn.look.fill))
        node = _draw(chart, span, drawn, scale, span in stuck or place in marks.at)
        marks.number(chart, place, chart.x(span.start))
        if node and span not in unrun:
            nodes.setdefault(span.task, (span, node))
            drawn_at[place] = (span, node)
    _draw_transfers(chart, nodes, scale)
    waits = _draw_waits(chart, drawn_at, lanes, scale)
    entries = [*_marks(program, scale), *_arrows(program, scale)]
    if waits:
        entries.append(Entry("waits for an event", WAIT_ARROW))
    if marks.faults:
        entries.append(Entry("at fault", FAULTY, "1"))
    if unrun:
        entries.append(Entry("waits for ever", WAITING))
        entries.append(Entry("never runs", NEVER))
    below = chart.legend(chart.bottom + 10, entries)
    marks.list(chart, below)
    return chart.canvas.picture


def _unit(program: Program) -> float:
    """The width of a forward in points where marks are drawn, so that its label fits well."""
    labels = {
        glyph(instruction, program).label
        for instructions in program.lists
        for instruction in instructions
        if isinstance(instruction, ins.Forward)
    }
    return max([_UNIT, *(text_width(label, _LABEL) + _AIR for label in labels)])


def _draw(
    chart: Chart, span: Span[ins.Instruction], drawn: Glyph, scale: _Scale, wrong: bool
) -> str | None:
    """Draw an instruction; returns its node, which is invisible for a transfer without a mark.

    An instruction at fault is drawn even where others of its kind are left out.
    """
    corner = (chart.x(span.start), chart.y(span.device))
    label, size, width = drawn.label, _MARK_LABEL, _MARK_BOX
    if not drawn.mark:
        width = (span.end - span.start) * scale.fit.scale
        size = scale.fit.size
        if scale.marks:
            size = min(size, (width - 1) / text_width(label, 1))
        else:
            label = scale.fit.label(label, span.end - span.start)
    elif not scale.marks and not wrong:
        moves = isinstance(span.task, _TRANSFERS)
        return chart.canvas.box(corner, 0, 0, Look()) if moves and scale.arrows else None
    height = drawn.height * chart.row_height
    aside = (_MARK - _MARK_BOX) / 2 if drawn.mark else 0.0
    return chart.canvas.box(
        (corner[0] + aside, corner[1] + (chart.row_height - height) / 2),
        width,
        height,
        drawn.look,
        label=label,
        size=size,
        tooltip=print_instruction(span.task) if scale.marks or wrong else "",
    )


def _draw_transfers(
    chart: Chart, nodes: dict[ins.Instruction, tuple[Span[ins.Instruction], str]], scale: _Scale
) -> None:
    """Draw an arrow from each send or stash to the receive or pop of the same buffer."""
    for instruction, (span, tail) in nodes.items():
        match instruction:
            case ins.Send(buffer):
                arrival: ins.Instruction = ins.Receive(buffer)
            case ins.Stash(buffer):
                arrival = ins.Pop(buffer)
            case _:
                continue
        if arrival in nodes:
            target, head = nodes[arrival]
            path = _path(chart, span, target, scale, buffer)
            chart.canvas.arrow(tail, head, path, arrow(buffer.kind), tooltip=str(buffer))


def _path(
    chart: Chart,
    source: Span[ins.Instruction],
    target: Span[ins.Instruction],
    scale: _Scale,
    buffer: Buffer,
) -> list[Point]:
    """The arrow's path from mark to mark, or without marks from row edge to row edge."""
    if scale.marks:
        shift, inset = _MARK / 2, chart.row_height * (1 - MARK_HEIGHT) / 2
    else:
        shift, inset = _ASIDE if buffer.kind == "grad" else -_ASIDE, 0.0
    x1, x2 = chart.x(source.start) + shift, chart.x(target.start) + shift
    upper, lower = inset, chart.row_height - inset
    if source.device == target.device:
        y = chart.y(source.device) + upper
        bend = y - chart.row_height * 0.7
        return [(x1, y), (x1, bend), (x2, bend), (x2, y)]
    down = target.device > source.device
    y1 = chart.y(source.device) + (lower if down else upper)
    y2 = chart.y(target.device) + (upper if down else lower)
    middle = (y1 + y2) / 2
    return [(x1, y1), (x1, middle), (x2, middle), (x2, y2)]


def _draw_waits(
    chart: Chart, drawn: dict[Place, tuple[Span[ins.Instruction], str]], lanes: Lanes, scale: _Scale
) -> bool:
    """Draw an arrow from each record of an event to its waits on other rows. Returns whether
    there are any."""
    found = [
        (drawn[source], drawn[target])
        for target, sources in lanes.waits.items()
        for source in sources
        if scale.marks and source in drawn and target in drawn and source[0] != target[0]
    ]
    for (before, tail), (after, head) in found:
        down = after.device > before.device
        x1, x2 = chart.x(before.end), chart.x(after.start)
        y1 = chart.y(before.device) + (chart.row_height if down else 0)
        y2 = chart.y(after.device) + (0 if down else chart.row_height)
        middle = (y1 + y2) / 2
        path = [(x1, y1), (x1, middle), (x2, middle), (x2, y2)]
        chart.canvas.arrow(tail, head, path, WAIT_ARROW)
    return bool(found)


def _in_rows(marks: Marks, lanes: Lanes) -> Marks:
    """The same faults at their rows in the picture; those of a whole device at its first row."""
    first: dict[int, int] = {}
    for row, lane in enumerate(lanes.rows):
        first.setdefault(lane.device, row)
    return Marks(
        marks.faults,
        {lanes.at.get(place, Place(-1, -1)): numbers for place, numbers in marks.at.items()},
        {first[device]: found for device, found in marks.rows.items() if device in first},
    )


def _row_label(program: Program, lane: Lane) -> str:
    label = row_label(program.placement, lane.device)
    return f"{label} · {lane.stream}" if lane.stream else label


def _title(program: Program, timeline: Timeline[ins.Instruction], marks: Marks) -> str:
    count = sum(map(len, program.lists))
    parts = [
        f"program of {program.name}",
        f"p = {program.devices}",
        f"m = {program.microbatches}",
        f"{count} instruction{'' if count == 1 else 's'}",
    ]
    if timeline.stuck:
        parts.append(f"STUCK: {len(timeline.unrun)} never run")
    if marks.faults:
        parts.append(marks.count)
    return " · ".join(parts)


def _marks(program: Program, scale: _Scale) -> list[Entry]:
    """The legend of the boxes: each opcode of the program, and those that are not drawn."""
    examples: dict[type[ins.Instruction], ins.Instruction] = {}
    for instructions in program.lists:
        for instruction in instructions:
            examples.setdefault(type(instruction), instruction)
    entries: list[Entry] = []
    left_out: list[str] = []
    for word, kind in ins.OPCODES.items():
        if kind not in examples:
            continue
        drawn = glyph(examples[kind], program)
        if not drawn.mark:
            entries.append(Entry(word, replace(drawn.look, border=FAINT), drawn.label[0]))
        elif scale.marks:
            entries.append(Entry(word, drawn.look, drawn.label))
        elif not (scale.arrows and kind in _TRANSFERS):
            left_out.append(word)
    entries.append(Entry("idle", Look(IDLE, FAINT)))
    if left_out:
        entries.append(Entry(f"(too many to be shown: {', '.join(left_out)})"))
    return entries


def _arrows(program: Program, scale: _Scale) -> list[Entry]:
    """The legend of the arrows."""
    if not scale.arrows:
        return []
    return arrow_entries(
        {
            instruction.buffer.kind
            for instructions in program.lists
            for instruction in instructions
            if isinstance(instruction, ins.Send | ins.Stash)
        }
    )
