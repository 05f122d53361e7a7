"""Simulations as one interactive HTML page with zoom, pan, search and tooltips.

bokeh draws the page, which holds all of its data and scripts and so opens without a network. The
tasks are compressed columns of numbers. ``page.js`` draws those in sight and joins tasks that are
too narrow to tell apart, so that the number of boxes depends on the screen alone.
"""

from __future__ import annotations

import gzip
from array import array
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from fxpipe.errors import InputError
from fxpipe.extensions.draw.chart import row_height
from fxpipe.extensions.draw.picture import FAINT, IDLE, INK, OTHER, SKIP, TASKS
from fxpipe.extensions.draw.schedule import simulation_title
from fxpipe.extensions.draw.styles import TaskStyles, simulation_boxes
from fxpipe.extensions.simulator.analysis import stash_levels
from fxpipe.extensions.simulator.simulate import simulate
from fxpipe.extensions.simulator.simulation import Simulation, task_of, version_of
from fxpipe.ir.task import KINDS
from fxpipe.ir.value import Buffer

Columns = dict[str, "array[Any]"]

_TYPES = {"f": "Float32Array", "d": "Float64Array", "i": "Int32Array"}
_AIR = 0.02
"""Empty space at either end, as a share of the whole time."""

_CLOSEST = 1e-6
"""The shortest time that zooming can show, as a share of the whole."""

_HELP = (
    "Drag to move, scroll to zoom, point at a task to see what it waits for. Search as schedules "
    "write tasks: F3@1, or a part of it: F, 3, F3, @1; Enter goes to the next."
)


def simulation_page(simulation: Simulation, *beside: Simulation) -> str:
    """Return an interactive page that a browser opens without a network.

    It zooms, pans, searches, and shows for each task what it waits for and what its device holds. A
    measured run without others gets a simulation with its mean times above it.

    Args:
        beside: other simulations of the program, such as a measured one.

    Raises:
        InputError: bokeh is not installed, which ``fxpipe[html]`` brings.
    """
    if simulation.measured and not beside:
        costs, sizes = simulation.costs, simulation.sizes
        predicted = simulate(simulation.window, costs, sizes=sizes, steps=simulation.steps)
        return make_page(replace(predicted, seconds=simulation.seconds), simulation)
    return make_page(simulation, *beside)


def make_page(*simulations: Simulation) -> str:
    """Return the page as HTML: the simulations below each other, then the memory of the devices.

    All times are shown in milliseconds if one of the simulations is in seconds.

    Raises:
        InputError: bokeh is not installed, or no simulation is given.
    """
    if not simulations:
        raise InputError("there is no simulation to show; give at least one")
    if find_spec("bokeh") is None:
        raise InputError("the page is drawn by bokeh; pip install fxpipe[html]")
    from bokeh.document import Document
    from bokeh.embed import file_html
    from bokeh.layouts import column, gridplot, row
    from bokeh.models import CustomJS, Div, Range1d, TextInput
    from bokeh.resources import INLINE

    seconds = any(simulation.seconds for simulation in simulations)
    unit = 1e3 if seconds else 1.0
    end = max(simulation.makespan for simulation in simulations) * unit or 1.0
    edges = -_AIR * end, end * (1 + _AIR)
    sight = Range1d(*edges, bounds=edges, min_interval=end * _CLOSEST, name="sight")
    packed: list[array[Any]] = []
    counted = all(simulation.sizes is not None for simulation in simulations)
    views = [_view(simulation, unit, counted, packed) for simulation in simulations]
    plots = [
        _timeline(number, view, simulation_title(simulation, seconds), sight)
        for number, (simulation, view) in enumerate(zip(simulations, views, strict=True))
    ]
    plots.append(_curves(views, counted, sight))
    plots[-1].xaxis.axis_label = "milliseconds" if seconds else "time"
    search = TextInput(title="Search", placeholder="F3@1", width=220, name="search")
    hits = Div(text="")
    start = CustomJS(
        args={
            "views": views,
            "sight": sight,
            "plot": plots[0],
            "search": search,
            "found": hits,
            "blob": b64encode(gzip.compress(b"".join(map(bytes, packed)), mtime=0)).decode(),
        },
        code=(Path(__file__).parent / "page.js").read_text(encoding="utf-8"),
        module=True,
    )
    layout = column(
        Div(text=_legend(simulations), sizing_mode="stretch_width"),
        row(search, hits),
        gridplot([[plot] for plot in plots], sizing_mode="stretch_width", merge_tools=True),
        sizing_mode="stretch_width",
    )
    name = simulations[0].program.name
    document = Document(title=f"{name} · fxpipe")
    document.add_root(layout)
    document.js_on_event("document_ready", start)
    text: str = file_html(document, INLINE)
    return text


def _view(
    simulation: Simulation, unit: float, counted: bool, packed: list[array[Any]]
) -> dict[str, Any]:
    """Return what ``page.js`` needs to know about a simulation; appends its columns to ``packed``.

    ``rows`` and ``points`` are the numbers of tasks and of points of the memory curve, by device.
    """
    levels, boxes = _levels(simulation, counted), simulation_boxes(simulation)
    looks: dict[tuple[str, str], int] = {}
    tasks = _tasks(simulation, levels, boxes, unit, looks)
    points: Columns = {"when": array("f"), "level": array("d")}
    counts = [
        _curve(starts, device_levels, unit, points)
        for starts, device_levels in zip(simulation.events.starts, levels, strict=True)
    ]
    columns = tasks | points
    packed += columns.values()
    rows = [0] * simulation.devices
    for span in simulation.spans:
        rows[span.device] += 1
    return {
        "what": "measured" if simulation.measured else "predicted",
        "rows": rows,
        "points": counts,
        "looks": [
            [letter, KINDS[letter].name if letter in KINDS else letter, colour]
            for letter, colour in looks
        ],
        "stages": boxes.tags_stages,
        "batches": simulation.steps > 1,
        "bytes": counted,
        "columns": [[name, _TYPES[data.typecode], len(data)] for name, data in columns.items()],
    }


def _levels(simulation: Simulation, counted: bool) -> Sequence[Sequence[int]]:
    """Device → the bytes that it holds during each instruction, or, if bytes are not counted, the
    micro-batches that its stages keep for backward."""
    if counted:
        return [memory.levels for memory in simulation.memory]
    return [[level for *_, level in stash_levels(row)] for row in simulation.program.lists]


def _tasks(
    simulation: Simulation,
    levels: Sequence[Sequence[int]],
    boxes: TaskStyles,
    unit: float,
    looks: dict[tuple[str, str], int],
) -> Columns:
    """The columns of the tasks, device by device; adds to ``looks``, (letter, colour) → number."""
    program, sizes, transfers = simulation.program, simulation.sizes, simulation.events.transfers
    makers: dict[Buffer, int] = {}
    for number, span in enumerate(simulation.spans):
        for buffer in span.instruction.makes(program):
            makers.setdefault(buffer, number)
    columns: Columns = {name: array("f") for name in ("start", "end", "arrival")}
    for name in ("look", "stage", "microbatch", "batch", "version", "waits", "maker"):
        columns[name] = array("i")
    columns |= {name: array("d") for name in ("holds", "receives")}
    for number, span in enumerate(simulation.spans):
        task = task_of(span.instruction)
        look = looks.setdefault((task.kind, boxes.look(task).fill), len(looks))
        awaited: dict[int, float] = {}
        received = 0
        for buffer in span.instruction.uses(program):
            maker, way = makers.get(buffer), transfers.get(buffer)
            if maker is None or maker == number:
                continue
            moved = way is not None and way.target == span.device != way.source
            when = way.end if way is not None and moved else simulation.spans[maker].end
            awaited[maker] = max(awaited.get(maker, 0.0), when * unit)
            if moved and sizes is not None:
                received += sizes.values.get(buffer.value, 0)
        values: dict[str, float] = {
            "start": span.start * unit,
            "end": span.end * unit,
            "look": look,
            "stage": -1 if task.stage is None else task.stage,
            "microbatch": -1 if task.microbatch is None else task.microbatch,
            "batch": task.batch,
            "version": version_of(span.instruction),
            "waits": len(awaited),
            "holds": levels[span.device][span.position],
            "receives": received,
        }
        for name, value in values.items():
            columns[name].append(value)
        columns["maker"].extend(awaited)
        columns["arrival"].extend(awaited.values())
    return columns


def _curve(starts: Sequence[float], levels: Sequence[int], unit: float, points: Columns) -> int:
    """Add the points where the level changes; returns their number.

    Of the levels at one time, only the highest and the last are kept.
    """
    count = 0
    for when, same in groupby(zip(starts, levels, strict=True), itemgetter(0)):
        at_once = [level for _, level in same]
        for level in dict.fromkeys((max(at_once), at_once[-1])):
            if not count or points["level"][-1] != level:
                points["when"].append(when * unit)
                points["level"].append(level)
                count += 1
    return count


def _timeline(number: int, view: dict[str, Any], title: str, sight: Any) -> Any:
    """The plot of a simulation, with a row of boxes for each device.

    Adds to ``view`` the data sources that ``page.js`` fills.
    """
    from bokeh.models import ColumnDataSource, CustomJS, CustomJSHover, Range1d

    devices = len(view["rows"])
    height = row_height(devices)
    plot = _figure(
        title,
        sight,
        name=f"timeline {number}",
        height=round(devices * height * 1.25) + 60,
        y_range=Range1d(devices - 0.5, -0.5),
    )
    several = max(1, devices // 32)
    plot.yaxis.ticker = list(range(0, devices, several))
    plot.yaxis.major_label_overrides = {at: f"device {at}" for at in range(devices)}
    plot.background_fill_color = IDLE
    plot.ygrid.visible = False
    names = ("left", "right", "top", "bottom", "colour", "alpha", "at", "count")
    boxes = ColumnDataSource({name: [] for name in names})
    texts = ColumnDataSource({"x": [], "y": [], "text": []})
    ways = ColumnDataSource({"x0": [], "y0": [], "x1": [], "y1": []})
    drawn = plot.quad(
        left="left",
        right="right",
        top="top",
        bottom="bottom",
        fill_color="colour",
        fill_alpha="alpha",
        line_color=None,
        source=boxes,
    )
    if height >= 12:
        plot.text(
            text_align="center",
            text_baseline="middle",
            text_font_size="10px",
            text_color=INK,
            source=texts,
        )
    plot.segment(line_color=SKIP, line_width=2, source=ways)
    told = CustomJSHover(
        args={"number": number, "boxes": boxes},
        code="return fxpipe.tell(number, boxes.data, special_vars.index)",
    )
    pointed = CustomJS(args={"number": number}, code="fxpipe.point(number, cb_data.index.indices)")
    _hover(plot, drawn, "@at", told, point_policy="follow_mouse", callback=pointed)
    view |= {"boxes": boxes, "texts": texts, "ways": ways}
    return plot


def _curves(views: list[dict[str, Any]], counted: bool, sight: Any) -> Any:
    """The plot of memory, with a line for each device: solid for the first simulation, else dashed.

    Adds to each view the data source that ``page.js`` fills.
    """
    from bokeh.models import (
        AdaptiveTicker,
        ColumnDataSource,
        CustomJSHover,
        NumeralTickFormatter,
        Range1d,
    )
    from bokeh.palettes import Colorblind

    title = (
        "predicted memory of devices" if counted else "micro-batches that stages keep for backward"
    )
    if len(views) > 1:
        title += f" (dashed: at the times that are {views[1]['what']})"
    plot = _figure(title, sight, height=220, y_range=Range1d(0, 1))
    if counted:
        plot.yaxis.ticker = AdaptiveTicker(base=1024, mantissas=[2**power for power in range(10)])
        plot.yaxis.formatter = NumeralTickFormatter(format="0 ib")
    colours = Colorblind[8]
    for number, view in enumerate(views):
        lines = ColumnDataSource({"xs": [], "ys": [], "colour": [], "device": []})
        drawn = plot.multi_line(
            xs="xs",
            ys="ys",
            line_color="colour",
            line_width=1.5,
            line_dash="dashed" if number else "solid",
            source=lines,
        )
        told = CustomJSHover(
            args={"number": number, "lines": lines},
            code="return fxpipe.level(number, value, special_vars.data_x)",
        )
        _hover(plot, drawn, "@device", told)
        view |= {"lines": lines, "height": plot.y_range}
        view["colours"] = [colours[at % len(colours)] for at in range(len(view["rows"]))]
    return plot


def _hover(plot: Any, drawn: Any, column: str, told: Any, **more: Any) -> None:
    """Add a tooltip to a plot; ``told`` makes its text from a value of ``column``."""
    from bokeh.models import HoverTool

    text = f'<div style="white-space: pre">{column}{{custom}}</div>'
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=text, formatters={column: told}, **more))


def _figure(title: str, sight: Any, **more: Any) -> Any:
    from bokeh.plotting import figure

    return figure(
        title=title,
        x_range=sight,
        tools="xpan,xwheel_zoom,xbox_zoom,xzoom_in,xzoom_out,reset,save",
        active_drag="xpan",
        active_scroll="xwheel_zoom",
        min_border_left=70,
        sizing_mode="stretch_width",
        **more,
    )


def _legend(simulations: Sequence[Simulation]) -> str:
    """The help text and the legend of the colours, as HTML."""
    letters = {task_of(span.instruction).kind for shown in simulations for span in shown.spans}
    style = f"display: inline-block; border: 1px solid {FAINT}; padding: 0 4px; background: "
    entries = [
        f'<span style="{style}{TASKS.get(letter, OTHER)}">{letter}</span> {escape(kind.name)}'
        for letter, kind in KINDS.items()
        if letter in letters
    ]
    several = any(shown.program.stages > shown.devices for shown in simulations)
    lighter = "lighter: later stages of a device" if several else ""
    return f"{escape(_HELP)}<br>{' &ensp; '.join(filter(None, [*entries, lighter]))}"
