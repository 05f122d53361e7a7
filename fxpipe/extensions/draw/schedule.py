"""Draws schedules and simulations: devices as rows, time to the right, tasks to scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from fxpipe.errors import InputError
from fxpipe.extensions.draw.canvas import BoxStyle, Canvas
from fxpipe.extensions.draw.chart import (
    FAULTY,
    GAP,
    NEVER,
    WAITING,
    Chart,
    ChartScale,
    FaultMarks,
    LegendEntry,
    fault_entries,
    number_faults,
    row_height,
    scale_for,
)
from fxpipe.extensions.draw.picture import INK, PAPER, Picture
from fxpipe.extensions.draw.styles import (
    TaskStyles,
    arrow,
    arrow_entries,
    boxes_of,
    simulation_boxes,
)
from fxpipe.extensions.draw.timeline import Bar, Timeline, simulated, timeline_of
from fxpipe.extensions.simulator.costs import Costs
from fxpipe.extensions.simulator.simulate import simulate
from fxpipe.extensions.simulator.simulation import Simulation, TransferSpan
from fxpipe.extensions.simulator.sums import Sum
from fxpipe.extensions.tables import time_text
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task
from fxpipe.ir.walk import Place

WITH_ARROWS = 1000
"""The most transfers of a picture that shows them as arrows."""

_PAIR = BoxStyle(border=INK, penwidth=1.2)
_LEFT_OUT = LegendEntry("(labels that do not fit are left out)")
_BETWEEN = 10.0
_MILLISECONDS = 1e3
_STAGES_SHOWN = 6
_PART = 0.9
"""How much smaller than its part of a task a label is, so that it has some air there, too."""

_WITH_TOOLTIPS = 4000
"""The most tasks of a picture whose tasks have tooltips."""


def draw_schedule(
    schedule: Schedule,
    *,
    costs: Costs | None = None,
    steps: int | None = None,
) -> Picture:
    """Draw when each task runs, with communication that takes no time.

    Faults of an invalid schedule are red: a number over each task at fault, and the list below.
    If the schedule deadlocks, the tasks that never run follow the one at which their device waits.

    Args:
        schedule: the schedule.
        costs: letter of a kind of task, or letter and stage → its time; by default its kind's.
        steps: how many steps to draw, with the flush after the last. By default one step, or, if
            batches overlap, enough steps to show one in steady state.

    Raises:
        InputError: a letter or stage of ``costs`` is unknown, or a time negative or not finite;
            ``steps`` is below 1.
    """
    timeline, marks = timeline_of(schedule, costs, steps)
    simulation = timeline.simulation
    boxes = boxes_of(schedule) if simulation is None else simulation_boxes(simulation)
    fitted = _fit([(timeline, boxes)])
    canvas, charts = Canvas("schedule"), list[Chart]()
    for start, end in _lines(timeline.end, fitted):
        chart = Chart(
            canvas,
            "" if charts else _title(schedule, timeline, marks),
            _row_labels(schedule, timeline, marks),
            end,
            fitted.scale,
            start=start,
            top=charts[-1].axis() if charts else 0.0,
            gap=GAP if marks.faults else 0.2,
            height=fitted.height,
            wrong=marks.rows,
        )
        charts.append(chart)
    whole = _draw_tasks(charts, timeline, boxes, fitted, marks)
    below = charts[-1].axis(_caption(timeline))
    below = charts[-1].legend(below, _legend(boxes, timeline, marks, whole))
    marks.list(charts[-1], below)
    return canvas.picture


def _lines(end: float, fitted: ChartScale) -> list[tuple[float, float]]:
    """The start and the end of each line of a chart."""
    long = end / fitted.lines
    return [(line * long, (line + 1) * long) for line in range(fitted.lines)]


def _fit(drawn: Sequence[tuple[Timeline[Task], TaskStyles]]) -> ChartScale:
    """Choose a common scale for these timelines.

    Tasks that run once per step, such as updates, do not count: they may be too short for their
    labels.
    """
    labels = {
        (boxes.label(span.task), span.end - span.start)
        for timeline, boxes in drawn
        for span in (*timeline.spans, *timeline.unrun)
        if span.task.microbatch is not None
    }
    devices = max(timeline.devices for timeline, _ in drawn)
    end = max(timeline.end for timeline, _ in drawn)
    lines = max((label.count("\n") + 1 for label, _ in labels), default=1)
    return scale_for(labels, end or 1.0, row_height(devices, lines), len(drawn) * devices)


def _draw_tasks(
    charts: Sequence[Chart],
    timeline: Timeline[Task],
    boxes: TaskStyles,
    fitted: ChartScale,
    marks: FaultMarks,
) -> bool:
    """Draw the boxes of all tasks, each in the lines that it crosses; returns whether all labels
    fit completely."""
    whole = True
    stuck = set(timeline.stuck)
    told = len(timeline.spans) <= _WITH_TOOLTIPS
    for number, span in enumerate((*timeline.spans, *timeline.unrun)):
        place = Place(span.device, span.position)
        if span.end == span.start and place not in marks.at:
            continue
        look = boxes.look(span.task)
        if number >= len(timeline.spans):
            look = WAITING if span in stuck else NEVER
        if place in marks.at:
            look = replace(FAULTY, fill=look.fill)
        label, tooltip = boxes.label(span.task), ""
        if told:
            tooltip = boxes.tell(span.task, span.start, span.end)
        crossed = _crossed(charts, span)
        longest = max(crossed, key=lambda part: part[2] - part[1])
        for chart, start, end in crossed:
            shown, fitting = "", fitted
            if chart is longest[0]:
                if len(crossed) > 1:  # its label fits into the part if it would into the whole
                    part = _PART * (end - start) / (span.end - span.start)
                    fitting = replace(fitted, size=fitted.size * part)
                shown = fitting.label(label, end - start)
                whole = whole and shown == label
            corner = (chart.x(start), chart.y(span.device))
            width = (end - start) * fitted.scale
            # An outline is centred on the edge: without an inset those of neighbours overlap.
            inset = 0.0 if look.border == PAPER else min(look.penwidth / 2, width / 4)
            chart.canvas.box(
                (corner[0] + inset, corner[1]),
                width - 2 * inset,
                chart.row_height,
                look,
                label=shown,
                size=fitting.size,
                tooltip=tooltip,
                name=f"task{number}" + (f"at{chart.top:g}" if chart.top else ""),
            )
        marks.number(crossed[0][0], place, crossed[0][0].x(crossed[0][1]))
    _draw_pairs(charts, timeline)
    return whole


def _draw_pairs(charts: Sequence[Chart], timeline: Timeline[Task]) -> None:
    """Draw a border around both tasks of each pair, as in DualPipe's figures."""
    for first, then in pairwise(timeline.spans if timeline.joined else ()):
        if (then.device, then.position) in timeline.joined:
            for chart, start, end in _crossed(charts, then._replace(start=first.start)):
                corner, width = (
                    (chart.x(start), chart.y(then.device)),
                    chart.x(end) - chart.x(start),
                )
                chart.canvas.box(corner, width, chart.row_height, _PAIR)


def _crossed(charts: Sequence[Chart], span: Bar[Task]) -> list[tuple[Chart, float, float]]:
    """The lines that a task crosses, with its start and end in each."""
    crossed = [
        (chart, max(span.start, chart.start), min(span.end, chart.end))
        for chart in charts
        if max(span.start, chart.start) < min(span.end, chart.end)
    ]
    if crossed:
        return crossed
    chart = next((c for c in charts if span.start < c.end), charts[-1])  # it takes no time
    return [(chart, span.start, span.end)]


def _row_labels(
    drawn: Schedule | Program, timeline: Timeline[Task], marks: FaultMarks
) -> list[str]:
    """The labels of the devices' rows, then of the rows of their offloads and prefetches."""
    labels = [marks.label(device, row_label(drawn, device)) for device in range(drawn.devices)]
    return labels + [
        f"device {device} · {KINDS[letter].name}" for device, letter in timeline.beside
    ]


def row_label(drawn: Schedule | Program, device: int) -> str:
    """``device 0``, with its stages unless it has just the stage of its own number."""
    held = drawn.held_by(device)
    if held == (device,):
        return f"device {device}"
    if not held:
        return f"device {device} (no stage)"
    shown = ", ".join(map(str, held[:_STAGES_SHOWN])) + (", …" if held[_STAGES_SHOWN:] else "")
    return f"device {device} ({'stage' if len(held) == 1 else 'stages'} {shown})"


def _title(schedule: Schedule, timeline: Timeline[Task], marks: FaultMarks) -> str:
    parts = [schedule.name, f"p = {schedule.devices}", f"m = {schedule.microbatches}"]
    if any(schedule.delays):
        delays = sorted({d for r in schedule.rules for d in (r if isinstance(r, tuple) else [r])})
        parts.append(f"delay = {delays[0]}" + (f" to {delays[-1]}" if len(delays) > 1 else ""))
    if timeline.steps > 1:
        parts.append(f"{timeline.steps} steps and flush")
    if timeline.unrun:
        parts.append(f"STUCK: {len(timeline.unrun)} tasks never run")
    if marks.faults:
        parts.append(marks.count)
    if timeline.simulation is not None:
        parts.append(f"bubble {timeline.simulation.bubble:.1%}")
    return " · ".join(parts)


def _caption(timeline: Timeline[Task]) -> str:
    """``time, with F = 1, B = 2``; if times differ, ``F = 1 to 1.5``."""
    times: dict[str, set[float]] = {letter: set() for letter in KINDS}
    for span in (*timeline.spans, *timeline.unrun):
        times.setdefault(span.task.kind, set()).add(round(span.end - span.start, 9))
    shown = [
        f"{letter} = " + " to ".join(f"{time:g}" for time in sorted({min(values), max(values)}))
        for letter, values in times.items()
        if values
    ]
    return f"time, with {', '.join(shown)}" if shown else "time"


def _legend(
    boxes: TaskStyles, timeline: Timeline[Task], marks: FaultMarks, whole: bool
) -> list[LegendEntry]:
    entries = boxes.legend(span.task for span in (*timeline.spans, *timeline.unrun))
    entries += _pair_entries(timeline)
    entries += fault_entries(marks, stuck=bool(timeline.unrun))
    return entries if whole else [*entries, _LEFT_OUT]


def _pair_entries(*timelines: Timeline[Task]) -> list[LegendEntry]:
    joined = any(timeline.joined for timeline in timelines)
    return [LegendEntry("a pair, which runs together", _PAIR)] if joined else []


def draw_program(program: Program) -> Picture:
    """Draw a simulation of a program, in which transfers take no time: its tasks, to scale.

    Raises:
        VerificationError: with all faults of the program.
    """
    return draw_simulations(simulate(program.verify()))


def draw_simulations(*simulations: Simulation) -> Picture:
    """Draw simulations below each other at one scale, for example a predicted and a measured one.

    The axis is in milliseconds if one of them is in seconds. A prediction is in seconds if its
    costs were measured: ``program.simulate(measured.costs).draw(measured)``. Transfers that take
    time are arrows.

    Raises:
        InputError: no simulation is given.
    """
    if not simulations:
        raise InputError("there is no simulation to draw; give at least one")
    measured = any(simulation.seconds for simulation in simulations)
    unit = _MILLISECONDS if measured else 1.0
    drawn = [
        (simulated(simulation, unit), simulation_boxes(simulation)) for simulation in simulations
    ]
    fitted = _fit(drawn)
    end = max(timeline.end for timeline, _ in drawn)
    canvas = Canvas("simulation")
    charts: list[list[Chart]] = [[] for _ in simulations]
    top = 0.0
    # Bands must be drawn before the first box, so all frames come first.
    for start, stop in _lines(end, fitted):
        for simulation, (timeline, _), own in zip(simulations, drawn, charts, strict=True):
            chart = Chart(
                canvas,
                simulation_title(simulation, measured) + (", continued" if start else ""),
                _row_labels(simulation.program, timeline, number_faults(())),
                stop,
                fitted.scale,
                start=start,
                top=top,
                gap=0.6 if _visible(simulation) else 0.2,
                height=fitted.height,
            )
            own.append(chart)
            top = chart.bottom + _BETWEEN
        if stop < end * (1 - 1e-9):
            top = chart.axis()
    whole = True
    for lines, simulation, (timeline, boxes) in zip(charts, simulations, drawn, strict=True):
        whole = _draw_tasks(lines, timeline, boxes, fitted, number_faults(())) and whole
        _draw_transfers(lines, simulation, unit)
    last = charts[-1][-1]
    below = last.axis("milliseconds" if measured else "time")
    tasks = {span.task for timeline, _ in drawn for span in timeline.spans}
    widest = max((boxes for _, boxes in drawn), key=lambda boxes: boxes.versions is not None)
    entries = widest.legend(tasks)
    entries += _pair_entries(*(timeline for timeline, _ in drawn))
    entries += arrow_entries({t.buffer.kind for shown in simulations for t in _visible(shown)})
    if not whole:
        entries.append(_LEFT_OUT)
    last.legend(below, entries)
    return canvas.picture


def simulation_title(simulation: Simulation, seconds: bool) -> str:
    program, makespan = simulation.program, simulation.makespan
    time = time_text(makespan) if seconds else f"{makespan:.4g}"
    parts = [
        "measured" if simulation.measured else "predicted",
        program.name,
        f"p = {program.devices}",
        f"m = {program.microbatches}",
        *([f"{program.replicas} replicas"] if program.replicas > 1 else []),
        *([f"{simulation.steps} steps and flush"] if simulation.steps > 1 else []),
        f"makespan {time}",
        f"bubble {simulation.bubble:.1%}",
    ]
    return " · ".join(parts)


_ABOVE = 2.0
"""How many points above its row a sum over the replicas is drawn."""


def _visible(simulation: Simulation) -> list[TransferSpan]:
    """The transfers to draw: those that take time between devices or replicas, if few enough."""
    taking = [
        t
        for t in simulation.transfers
        if t.end > t.start and (t.source != t.target or isinstance(t.buffer, Sum))
    ]
    return taking if len(taking) <= WITH_ARROWS else []


def _draw_transfers(charts: Sequence[Chart], simulation: Simulation, unit: float) -> None:
    """Draw an arrow from where each value is sent to where it arrives, or above a device's row
    while its gradients are summed over the replicas. If it arrives in another line, the arrow
    begins at the edge of that line."""
    for transfer in _visible(simulation):
        start, end = transfer.start * unit, transfer.end * unit
        chart = next((chart for chart in charts if end <= chart.end), charts[-1])
        xs = chart.x(max(start, chart.start)), chart.x(end)
        ends = chart.ends(transfer.source, xs[0], transfer.target, xs[1])
        if isinstance(transfer.buffer, Sum):
            above = chart.y(transfer.source) - _ABOVE
            ends = (xs[0], above), (xs[1], above)
        tail, head = (chart.canvas.box(at, 0, 0, BoxStyle()) for at in ends)
        (x1, y1), (x2, y2) = ends
        path = [(x1 + (x2 - x1) * part, y1 + (y2 - y1) * part) for part in (0, 1 / 3, 2 / 3, 1)]
        stroke = arrow(transfer.buffer.kind)
        chart.canvas.arrow(tail, head, path, stroke, tooltip=str(transfer.buffer))
