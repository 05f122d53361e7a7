"""A schedule as a picture: devices as rows, time to the right, every task to scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxpipe.draw.box import VERSIONS, Boxes, boxes_of
from fxpipe.draw.canvas import Canvas, Look
from fxpipe.draw.chart import Chart, Entry, Fit, fit, row_height
from fxpipe.draw.colours import INK, PAPER
from fxpipe.draw.marks import FAULTY, GAP, NEVER, WAITING, Marks
from fxpipe.draw.picture import Picture
from fxpipe.draw.timeline import Span, Timeline, timeline_of
from fxpipe.errors import Fault, InputError
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS, Task
from fxpipe.ir.walk import Place
from fxpipe.simulator.costs import Costs

_STAGES_SHOWN = 6
_STRIP = 3.0
_TOLD = 4000
"""The most tasks with which each has a tooltip."""


def draw_schedule(
    schedule: Schedule,
    *,
    costs: Costs | None = None,
    steps: int | None = None,
    faults: Sequence[Fault] | None = None,
) -> Picture:
    """Draw when each task runs, with communication that takes no time.

    An invalid schedule is drawn with all its faults in red: a number over each task at fault, and
    the list of them below. Where it deadlocks, the tasks that never run are drawn after the one at
    which their device waits.

    Args:
        schedule: the schedule.
        costs: letter of a kind of task, or letter and stage → its time; by default its kind's.
        steps: how many steps to draw, with the flush after the last. By default one step, or where
            batches overlap enough steps to show one in steady state.
        faults: the faults to mark; by default what the verifier finds.

    Raises:
        InputError: a letter or stage of ``costs`` is unknown, or a time negative or not finite;
            ``steps`` is below 1.
    """
    if steps is not None and steps < 1:
        raise InputError(f"steps is {steps}; draw at least 1")
    timeline, steps, marks = timeline_of(schedule, costs, steps, faults)
    boxes = boxes_of(schedule, steps)
    fitted = fit_timelines([(timeline, boxes)])
    chart = Chart(
        Canvas("schedule"),
        _title(schedule, timeline, steps, marks),
        row_labels(schedule.placement, schedule.devices, marks),
        timeline.end,
        fitted.scale,
        gap=GAP if marks.faults else 0.35 if boxes.versions else 0.2,
        wrong=marks.rows,
    )
    whole = draw_tasks(chart, timeline, boxes, fitted, marks)
    below = chart.axis(_caption(timeline))
    below = chart.legend(below, _legend(boxes, timeline, marks, whole))
    marks.list(chart, below)
    return chart.canvas.picture


def fit_timelines(drawn: Sequence[tuple[Timeline[Task], Boxes]]) -> Fit:
    """The common scale at which these timelines are drawn.

    Tasks that come once per step, such as updates, may be too short for their labels; they do not
    widen the rest.
    """
    found = {
        (boxes.label(span.task), span.end - span.start)
        for timeline, boxes in drawn
        for span in (*timeline.spans, *timeline.unrun)
        if span.task.microbatch is not None
    }
    devices = max(timeline.devices for timeline, _ in drawn)
    end = max(timeline.end for timeline, _ in drawn)
    return fit(found, end or 1.0, row_height(devices))


def draw_tasks(
    chart: Chart, timeline: Timeline[Task], boxes: Boxes, fitted: Fit, marks: Marks
) -> bool:
    """Draw the boxes of all tasks; returns whether all labels fit completely."""
    whole = True
    stuck = set(timeline.stuck)
    unrun = set(timeline.unrun)
    told = len(timeline.spans) <= _TOLD
    for number, span in enumerate((*timeline.spans, *timeline.unrun)):
        time = span.end - span.start
        place = Place(span.device, span.position)
        if time == 0 and place not in marks.at:
            continue
        look = boxes.look(span.task)
        if span in unrun:
            look = WAITING if span in stuck else NEVER
        if place in marks.at:
            look = replace(FAULTY, fill=look.fill)
        label = boxes.label(span.task)
        shown = fitted.label(label, time)
        whole = whole and shown == label
        corner = (chart.x(span.start), chart.y(span.device))
        width = time * fitted.scale
        # Outlines of neighbours would overlap.
        inset = 0.0 if look.border == PAPER else min(look.penwidth / 2, width / 4)
        chart.canvas.box(
            (corner[0] + inset, corner[1]),
            width - 2 * inset,
            chart.row_height,
            look,
            label=shown,
            size=fitted.size,
            tooltip=boxes.tell(span.task, span.start, span.end) if told else "",
            name=f"task{number}" + (f"at{chart.top:g}" if chart.top else ""),
        )
        version = boxes.version(span.task)
        if version is not None and time:
            strip = Look(VERSIONS[version % len(VERSIONS)], INK, 0.3)
            chart.canvas.box((corner[0], corner[1] + chart.row_height + 0.5), width, _STRIP, strip)
        marks.number(chart, place, corner[0])
    return whole


def row_labels(placement: Sequence[int], devices: int, marks: Marks) -> list[str]:
    """The label of each device's row."""
    return [marks.label(device, row_label(placement, device)) for device in range(devices)]


def row_label(placement: Sequence[int], device: int) -> str:
    """``device 0``, with its stages where they are not simply stage 0."""
    held = [stage for stage, home in enumerate(placement) if home == device]
    if held == [device]:
        return f"device {device}"
    if not held:
        return f"device {device} (no stage)"
    shown = ", ".join(map(str, held[:_STAGES_SHOWN])) + (", …" if held[_STAGES_SHOWN:] else "")
    return f"device {device} ({'stage' if len(held) == 1 else 'stages'} {shown})"


def _title(schedule: Schedule, timeline: Timeline[Task], steps: int, marks: Marks) -> str:
    parts = [schedule.name, f"p = {schedule.devices}", f"m = {schedule.microbatches}"]
    if any(schedule.delays):
        delays = sorted(set(schedule.delays))
        parts.append(f"delay = {delays[0]}" + (f" to {delays[-1]}" if len(delays) > 1 else ""))
    if steps:
        parts.append(f"{steps} step{'' if steps == 1 else 's'} and flush")
    if timeline.unrun:
        parts.append(f"STUCK: {len(timeline.unrun)} tasks never run")
    if marks.faults:
        parts.append(marks.count)
    if timeline.bubble is not None:
        parts.append(f"bubble {timeline.bubble:.1%}")
    return " · ".join(parts)


def _caption(timeline: Timeline[Task]) -> str:
    """``time, with F = 1, B = 2``; where the stages differ, ``F = 1 to 1.5``."""
    times: dict[str, set[float]] = {letter: set() for letter in KINDS}
    for span in (*timeline.spans, *timeline.unrun):
        times.setdefault(span.task.kind, set()).add(round(span.end - span.start, 9))
    shown = [
        f"{letter} = " + " to ".join(f"{time:g}" for time in sorted({min(found), max(found)}))
        for letter, found in times.items()
        if found
    ]
    return f"time, with {', '.join(shown)}" if shown else "time"


def _legend(boxes: Boxes, timeline: Timeline[Task], marks: Marks, whole: bool) -> list[Entry]:
    spans: list[Span[Task]] = [*timeline.spans, *timeline.unrun]
    entries = boxes.legend(span.task for span in spans)
    if marks.faults:
        entries.append(Entry("at fault", FAULTY, "1"))
    if timeline.unrun:
        entries.append(Entry("waits for ever", WAITING))
        entries.append(Entry("never runs", NEVER))
    if not whole:
        entries.append(Entry("(labels that do not fit are left out)"))
    return entries
