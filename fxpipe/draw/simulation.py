"""Simulations as a picture: one timeline below the other, at the same scale."""

from __future__ import annotations

from fxpipe.draw.box import Boxes
from fxpipe.draw.canvas import Canvas, Look
from fxpipe.draw.chart import Chart, Entry
from fxpipe.draw.glyph import arrow, arrow_entries
from fxpipe.draw.marks import mark
from fxpipe.draw.picture import Picture
from fxpipe.draw.schedule import draw_tasks, fit_timelines, row_labels
from fxpipe.draw.timeline import simulated
from fxpipe.errors import InputError
from fxpipe.ir.task import Task
from fxpipe.simulator.simulation import Simulation, Transfer, task_of
from fxpipe.words import time_text

WITH_ARROWS = 1000
"""The most transfers with which those that take time are drawn."""

_BETWEEN = 10.0
_MILLISECONDS = 1e3


def draw_simulations(*simulations: Simulation) -> Picture:
    """Draw simulations below each other, such as a predicted one and a measured one.

    All have one scale, in seconds if one of them is in seconds. A predicted one is in seconds if
    its costs were measured: ``program.simulate(measured.costs).draw(measured)``. Transfers that
    take time are arrows.

    Raises:
        InputError: no simulation is given.
    """
    if not simulations:
        raise InputError("there is no simulation to draw; give at least one")
    measured = any(simulation.seconds for simulation in simulations)
    unit = _MILLISECONDS if measured else 1.0
    drawn = [(simulated(simulation, unit), _boxes(simulation)) for simulation in simulations]
    fitted = fit_timelines(drawn)
    end = max(timeline.end for timeline, _ in drawn)
    canvas = Canvas("simulation")
    charts: list[Chart] = []
    # All frames are drawn before the first box, as their bands are under the arrows.
    for simulation, (_, boxes) in zip(simulations, drawn, strict=True):
        chart = Chart(
            canvas,
            _title(simulation, measured),
            row_labels(simulation.program.placement, simulation.devices, mark(())),
            end,
            fitted.scale,
            top=charts[-1].bottom + _BETWEEN if charts else 0.0,
            gap=0.6 if _visible(simulation) else 0.35 if boxes.versions else 0.2,
        )
        charts.append(chart)
    whole = True
    for chart, simulation, (timeline, boxes) in zip(charts, simulations, drawn, strict=True):
        whole = draw_tasks(chart, timeline, boxes, fitted, mark(())) and whole
        _draw_transfers(chart, simulation, unit)
    below = charts[-1].axis("milliseconds" if measured else "time")
    tasks = {span.task for timeline, _ in drawn for span in timeline.spans}
    widest = max((boxes for _, boxes in drawn), key=lambda boxes: boxes.versions is not None)
    entries = widest.legend(tasks)
    entries += arrow_entries({t.buffer.kind for one in simulations for t in _visible(one)})
    if not whole:
        entries.append(Entry("(labels that do not fit are left out)"))
    charts[-1].legend(below, entries)
    return canvas.picture


def _boxes(simulation: Simulation) -> Boxes:
    program = simulation.program
    versions: dict[Task, int] = {}
    for span in simulation.spans:
        instruction = span.instruction
        made = getattr(instruction, "writes", getattr(instruction, "version", 0))
        versions[task_of(instruction)] = made
    differ = any(task.kind != "U" and v != task.batch for task, v in versions.items())
    return Boxes(
        program.placement, program.devices, simulation.steps, versions.get if differ else None
    )


def _title(simulation: Simulation, seconds: bool) -> str:
    program, makespan = simulation.program, simulation.makespan
    time = time_text(makespan) if seconds else f"{makespan:.4g}"
    parts = [
        "measured" if simulation.measured else "predicted",
        program.name,
        f"p = {program.devices}",
        f"m = {program.microbatches}",
        *([f"{simulation.steps} steps and flush"] if simulation.steps > 1 else []),
        f"makespan {time}",
        f"bubble {simulation.bubble:.1%}",
    ]
    if simulation.unrun:
        parts.append(f"STUCK: {simulation.unrun} instructions never run")
    return " · ".join(parts)


def _visible(simulation: Simulation) -> list[Transfer]:
    """The transfers that are drawn."""
    taking = [t for t in simulation.transfers if t.end > t.start and t.source != t.target]
    return taking if len(taking) <= WITH_ARROWS else []


def _draw_transfers(chart: Chart, simulation: Simulation, unit: float) -> None:
    """Draw a line from where each value is sent to where it arrives."""
    for transfer in _visible(simulation):
        down = transfer.target > transfer.source
        x1, x2 = chart.x(transfer.start * unit), chart.x(transfer.end * unit)
        y1 = chart.y(transfer.source) + (chart.row_height if down else 0)
        y2 = chart.y(transfer.target) + (0 if down else chart.row_height)
        tail, head = (chart.canvas.box(at, 0, 0, Look()) for at in ((x1, y1), (x2, y2)))
        path = [(x1 + (x2 - x1) * part, y1 + (y2 - y1) * part) for part in (0, 1 / 3, 2 / 3, 1)]
        stroke = arrow(transfer.buffer.kind)
        chart.canvas.arrow(tail, head, path, stroke, tooltip=str(transfer.buffer))
