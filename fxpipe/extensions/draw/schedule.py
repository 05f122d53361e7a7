"""Draws schedules and simulations: devices as rows, time to the right, tasks to scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    draw_legend,
    row_height,
    scale_for,
)
from fxpipe.extensions.draw.picture import INK, PAPER, Picture
from fxpipe.extensions.draw.styles import (
    TaskStyles,
    arrow,
    arrow_entries,
    of_model,
    simulation_boxes,
)
from fxpipe.extensions.draw.timeline import Bar, Timeline, simulated, timeline_of
from fxpipe.extensions.exchange import Exchange
from fxpipe.extensions.simulator.costs import Costs
from fxpipe.extensions.simulator.simulation import Simulation, TransferSpan
from fxpipe.extensions.tables import time_text
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS
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

    In an invalid schedule, tasks at fault have red borders, and the faults are listed below.
    If the schedule deadlocks, the tasks that never run follow the one at which their device waits.

    Args:
        schedule: the schedule.
        costs: letter of a kind of task, or letter and stage → its time; by default its kind's,
            and in ``pipe.schedule`` the measured times, in milliseconds.
        steps: how many steps to draw, with the flush after the last. By default one step, or, if
            batches overlap, enough steps to show one in steady state.

    Raises:
        InputError: a letter or stage of ``costs`` is unknown, or a time negative or not finite;
            ``steps`` is below 1.
    """
    measured = schedule.seconds if costs is None else {}
    if measured:
        costs = {key: time * _MILLISECONDS for key, time in measured.items()}
    timeline, marks = timeline_of(schedule, costs, steps)
    simulation = timeline.simulation
    boxes = (
        TaskStyles(schedule, slices=schedule.slices)
        if simulation is None
        else simulation_boxes(simulation)
    )
    title = _title(schedule, timeline, marks)
    caption = _caption(timeline, measured=bool(measured))
    return _draw("schedule", [_Shown(title, schedule, timeline, boxes, marks)], caption)


@dataclass(frozen=True)
class _Shown:
    """What one chart shows: the tasks of a schedule or program, its faults, and transfers."""

    title: str
    drawn: Schedule | Program
    timeline: Timeline
    boxes: TaskStyles
    marks: FaultMarks
    transfers: Sequence[TransferSpan] = ()

    @property
    def gap(self) -> float:
        return GAP if self.transfers else 0.2

    @property
    def labels(self) -> list[str]:
        """The labels of the devices' rows, then of the rows of their offloads and prefetches."""
        devices, beside = range(self.drawn.devices), self.timeline.beside
        labels = [row_label(self.drawn, device, self.boxes.slices) for device in devices]
        return labels + [f"device {device} · {KINDS[letter].name}" for device, letter in beside]


def _draw(name: str, shown: Sequence[_Shown], caption: str, unit: float = 1.0) -> Picture:
    """Draw charts below each other at one scale, and what they have in common below the last.
    Transfers are in times of this unit."""
    fitted, end = _fit(shown), max(one.timeline.end for one in shown)
    canvas, top = Canvas(name), 0.0
    charts: list[list[Chart]] = [[] for _ in shown]
    # Bands must be drawn before the first box, so all frames come first.
    for line in range(fitted.lines):
        if line:
            top = charts[-1][-1].axis()
        for one, own in zip(shown, charts, strict=True):
            again = "" if len(shown) == 1 else f"{one.title}, continued"
            chart = Chart(
                canvas,
                again if line else one.title,
                one.labels,
                (line + 1) * end / fitted.lines,
                fitted.scale,
                start=line * end / fitted.lines,
                top=top,
                gap=one.gap,
                height=fitted.height,
                marks=one.marks,
            )
            own.append(chart)
            top = chart.bottom + _BETWEEN
    whole = True
    for one, own in zip(shown, charts, strict=True):
        whole = _draw_tasks(own, one, fitted) and whole
        _draw_transfers(own, one.transfers, unit)
    last = charts[-1][-1]
    left, right, below = last.x(last.start), last.x(last.end), last.axis(caption)
    below = draw_legend(canvas, left, right, below, _legend(shown, whole))
    shown[-1].marks.list(canvas, left, below)
    return canvas.picture


def _fit(shown: Sequence[_Shown]) -> ChartScale:
    """Choose a common scale.

    Tasks that run once per step, such as updates, do not count: they may be too short for their
    labels.
    """
    labels = {
        (one.boxes.label(span.task), span.end - span.start)
        for one in shown
        for span in one.timeline.bars
        if span.task.microbatch is not None
    }
    devices = max(one.timeline.devices for one in shown)
    end = max(one.timeline.end for one in shown)
    lines = max((label.count("\n") + 1 for label, _ in labels), default=1)
    return scale_for(labels, end or 1.0, row_height(devices, lines), len(shown) * devices)


def _draw_tasks(charts: Sequence[Chart], shown: _Shown, fitted: ChartScale) -> bool:
    """Draw the boxes of all tasks, each in the lines that it crosses; returns whether all labels
    fit completely."""
    whole = True
    timeline, boxes, marks = shown.timeline, shown.boxes, shown.marks
    stuck = set(timeline.stuck)
    told = len(timeline.spans) <= _WITH_TOOLTIPS
    for number, span in enumerate(timeline.bars):
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
            text, fitting = "", fitted
            if chart is longest[0]:
                if len(crossed) > 1:  # its label fits into the part if it would into the whole
                    part = _PART * (end - start) / (span.end - span.start)
                    fitting = replace(fitted, size=fitted.size * part)
                text = fitting.label(label, end - start)
                whole = whole and text == label
            corner = (chart.x(start), chart.y(span.device))
            width = (end - start) * fitted.scale
            # An outline is centred on the edge: without an inset those of neighbours overlap.
            inset = 0.0 if look.border == PAPER else min(look.penwidth / 2, width / 4)
            chart.canvas.box(
                (corner[0] + inset, corner[1]),
                width - 2 * inset,
                chart.row_height,
                look,
                label=text,
                size=fitting.size,
                tooltip=tooltip,
                name=f"task{number}" + (f"at{chart.top:g}" if chart.top else ""),
            )
    _draw_pairs(charts, timeline)
    return whole


def _draw_pairs(charts: Sequence[Chart], timeline: Timeline) -> None:
    """Draw a border around both tasks of each pair, as in DualPipe's figures."""
    for first, then in pairwise(timeline.spans if timeline.joined else ()):
        if (then.device, then.position) in timeline.joined:
            for chart, start, end in _crossed(charts, then._replace(start=first.start)):
                corner = chart.x(start), chart.y(then.device)
                chart.canvas.box(corner, chart.x(end) - corner[0], chart.row_height, _PAIR)


def _crossed(charts: Sequence[Chart], span: Bar) -> list[tuple[Chart, float, float]]:
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


def row_label(drawn: Schedule | Program, device: int, slices: int = 1) -> str:
    """``device 0``, with its stages of the model unless it has just that of its own number."""
    stages = [of_model(drawn, slices, stage)[0] for stage in drawn.held_by(device)]
    held = tuple(dict.fromkeys(stages))
    if held == (device,):
        return f"device {device}"
    if not held:
        return f"device {device} (no stage)"
    shown = ", ".join(map(str, held[:_STAGES_SHOWN])) + (", …" if held[_STAGES_SHOWN:] else "")
    return f"device {device} ({'stage' if len(held) == 1 else 'stages'} {shown})"


def _title(schedule: Schedule, timeline: Timeline, marks: FaultMarks) -> str:
    parts = [schedule.name, f"p = {schedule.devices}", f"m = {schedule.microbatches}"]
    if any(schedule.delays):
        least, most = min(schedule.delays), max(schedule.delays)
        parts.append(f"delay = {least}" + (f" to {most}" if most > least else ""))
    if timeline.steps > 1:
        parts.append(f"{timeline.steps} steps and flush")
    if timeline.unrun:
        parts.append(f"STUCK: {len(timeline.unrun)} tasks never run")
    if marks.faults:
        parts.append(marks.count)
    if timeline.simulation is not None:
        parts.append(f"bubble {timeline.simulation.bubble:.1%}")
    return " · ".join(parts)


def _caption(timeline: Timeline, *, measured: bool) -> str:
    """``time, with F = 1, B = 2``; if times differ, ``F = 1 to 1.5``."""
    digits, unit = ("{:.3g}", "milliseconds") if measured else ("{:g}", "time")
    times: dict[str, set[float]] = {letter: set() for letter in KINDS}
    for span in timeline.bars:
        times.setdefault(span.task.kind, set()).add(round(span.end - span.start, 9))
    shown = [
        f"{letter} = " + " to ".join(dict.fromkeys(map(digits.format, (min(values), max(values)))))
        for letter, values in times.items()
        if values
    ]
    return f"{unit}, with {', '.join(shown)}" if shown else unit


def _legend(shown: Sequence[_Shown], whole: bool) -> list[LegendEntry]:
    boxes = max((one.boxes for one in shown), key=lambda boxes: bool(boxes.versions))
    entries = boxes.legend(span.task for one in shown for span in one.timeline.bars)
    if any(one.timeline.joined for one in shown):
        entries.append(LegendEntry("a pair, which runs together", _PAIR))
    entries += arrow_entries({t.buffer.kind for one in shown for t in one.transfers})
    if any(one.marks.faults for one in shown):
        entries.append(LegendEntry("at fault", FAULTY))
    if any(one.timeline.unrun for one in shown):
        entries += [LegendEntry("waits for ever", WAITING), LegendEntry("never runs", NEVER)]
    return entries if whole else [*entries, _LEFT_OUT]


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
    shown = [
        _Shown(
            _simulation_title(each, measured),
            each.program,
            simulated(each, unit),
            simulation_boxes(each),
            FaultMarks(),
            _visible(each),
        )
        for each in simulations
    ]
    return _draw("simulation", shown, "milliseconds" if measured else "time", unit)


def _simulation_title(simulation: Simulation, seconds: bool) -> str:
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
        if t.end > t.start and (t.source != t.target or isinstance(t.buffer, Exchange))
    ]
    return taking if len(taking) <= WITH_ARROWS else []


def _draw_transfers(
    charts: Sequence[Chart], transfers: Sequence[TransferSpan], unit: float
) -> None:
    """Draw an arrow from where each value is sent to where it arrives, or above a device's row
    while its gradients are summed over the replicas. If it arrives in another line, the arrow
    begins at the edge of that line."""
    for transfer in transfers:
        start, end = transfer.start * unit, transfer.end * unit
        chart = next((chart for chart in charts if end <= chart.end), charts[-1])
        xs = chart.x(max(start, chart.start)), chart.x(end)
        ends = chart.ends(transfer.source, xs[0], transfer.target, xs[1])
        if isinstance(transfer.buffer, Exchange):
            above = chart.y(transfer.source) - _ABOVE
            ends = (xs[0], above), (xs[1], above)
        tail, head = (chart.canvas.box(at, 0, 0, BoxStyle()) for at in ends)
        (x1, y1), (x2, y2) = ends
        path = [(x1 + (x2 - x1) * part, y1 + (y2 - y1) * part) for part in (0, 1 / 3, 2 / 3, 1)]
        stroke = arrow(transfer.buffer.kind)
        chart.canvas.arrow(tail, head, path, stroke, tooltip=str(transfer.buffer))
