"""A schedule as a picture: devices as rows, time to the right, every task to scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxpipe.draw.canvas import Look
from fxpipe.draw.chart import Chart, Entry, row_height
from fxpipe.draw.colours import FAINT, FAULT, IDLE, INK, OTHER, PAPER, TASKS
from fxpipe.draw.fit import fit
from fxpipe.draw.picture import Picture
from fxpipe.draw.timeline import Timeline, task_times, walk
from fxpipe.draw.walk import Span
from fxpipe.schedule import KINDS, Schedule, Task

STUCK = Look(PAPER, FAULT, 2.0)
"""A task that its device never comes to: it waits for ever."""

_STAGES_SHOWN = 6


def draw_schedule(schedule: Schedule, *, costs: Mapping[str, float] | None = None) -> Picture:
    """Draw when each task runs, if communication takes no time.

    An invalid schedule is drawn up to where it is stuck; the tasks at which devices wait for ever
    have a red border.

    Args:
        schedule: what to draw.
        costs: letter of a kind of task → its time; by default F 1, B 2 and U 0.5.

    Raises:
        InputError: ``costs`` has an unknown letter, or a time that is negative or not finite.
    """
    times = task_times(costs)
    timeline = walk(schedule, costs)
    stuck = set(timeline.stuck)
    drawn = [span for span in (*timeline.spans, *timeline.stuck) if span.end > span.start]
    end = max((span.end for span in drawn), default=1.0)
    labels = [_label(schedule, span.task) for span in drawn]
    boxes = {(label, span.end - span.start) for label, span in zip(labels, drawn, strict=True)}
    fitted = fit(boxes, end, row_height(schedule.devices))
    rows = [row_label(schedule.placement, device) for device in range(schedule.devices)]
    chart = Chart("schedule", _title(schedule, timeline), rows, end, fitted.scale)

    thinned = False
    for number, (span, label) in enumerate(zip(drawn, labels, strict=True)):
        time = span.end - span.start
        shown = fitted.label(label, time)
        thinned = thinned or shown != label
        chart.canvas.box(
            (chart.x(span.start), chart.y(span.device)),
            time * fitted.scale,
            chart.row_height,
            STUCK if span in stuck else _look(span.task),
            label=shown,
            size=fitted.size,
            name=f"task{number}",
        )

    letters = [letter for letter in KINDS if any(span.task.kind == letter for span in drawn)]
    caption = "time, with " + ", ".join(f"{letter} = {times[letter]:g}" for letter in letters)
    below = chart.axis(caption if letters else "time")
    chart.legend(below, _legend(letters, drawn, bool(stuck), thinned))
    return chart.canvas.picture


def row_label(placement: Sequence[int], device: int) -> str:
    """``device 0``, with its stages where they are not simply stage 0."""
    held = [stage for stage, home in enumerate(placement) if home == device]
    if held == [device]:
        return f"device {device}"
    if not held:
        return f"device {device} (no stage)"
    shown = ", ".join(map(str, held[:_STAGES_SHOWN])) + (", …" if held[_STAGES_SHOWN:] else "")
    return f"device {device} ({'stage' if len(held) == 1 else 'stages'} {shown})"


def _look(task: Task) -> Look:
    fill = TASKS.get(task.kind, OTHER)
    return Look(fill, INK, 0.8, "dashed") if task.batch else Look(fill, PAPER)


def _label(schedule: Schedule, task: Task) -> str:
    """``F3``, or ``F3@5`` where devices hold several stages."""
    if task.stage is not None and schedule.stages <= schedule.devices:
        task = Task(task.kind, task.microbatch, None, task.batch)
    return str(task)


def _title(schedule: Schedule, timeline: Timeline) -> str:
    parts = [schedule.name, f"p = {schedule.devices}", f"m = {schedule.microbatches}"]
    if schedule.delay:
        parts.append(f"delay = {schedule.delay}")
    if timeline.stuck:
        parts.append(f"STUCK: {timeline.unrun} tasks never run")
    else:
        parts.append(f"bubble {timeline.bubble:.1%}")
    return " · ".join(parts)


def _legend(
    letters: Sequence[str], drawn: Sequence[Span[Task]], stuck: bool, thinned: bool
) -> list[Entry]:
    entries = [
        Entry(KINDS[letter].name, Look(TASKS.get(letter, OTHER), FAINT), letter)
        for letter in letters
    ]
    entries.append(Entry("idle", Look(IDLE, FAINT)))
    if any(span.task.batch for span in drawn):
        entries.append(Entry("an earlier batch", Look(PAPER, INK, 0.8, "dashed"), "B3'"))
    if stuck:
        entries.append(Entry("stuck: waits for ever", STUCK))
    if thinned:
        entries.append(Entry("(labels that do not fit are left out)"))
    return entries
