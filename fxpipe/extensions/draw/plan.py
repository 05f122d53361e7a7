"""A plan as a picture: stages as boxes, edges with their bytes, and dashed skip connections."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape
from itertools import pairwise
from math import prod
from typing import Any

from fxpipe.extensions.draw.canvas import POINTS_PER_INCH, text_width
from fxpipe.extensions.draw.chart import FaultMarks, marks_of
from fxpipe.extensions.draw.picture import (
    FAINT,
    FAULT,
    FORWARD,
    INK,
    INPUT,
    SIZE,
    SKIP,
    Picture,
    blank,
    printable,
    quoted,
    tint,
)
from fxpipe.extensions.tables import count_text, lines, runs, shape_text, time_text
from fxpipe.formatting import bytes_text, plural
from fxpipe.ir.plan import Argument, Plan, Stage
from fxpipe.ir.value import HOST, Edge

_LINE, _MODULE_LINES = 44, 4
_NAME, _VALUES = 28, 6
_RED = {"color": FAULT, "penwidth": "2.5"}
"""The look of what is at fault."""


def draw_plan(plan: Plan) -> Picture:
    """Draw the stages in order, and the values that they exchange with each other and the caller.

    Values between the same two stages share an arrow, with a ring at its tail if gradients come
    back. In an invalid plan, stages and edges at fault are red, and the faults are listed below.
    """
    marks = marks_of(plan)
    wrong = {fault.subject.partition(",")[0] for fault in marks.faults}
    picture = blank("plan", rankdir="TB", nodesep="0.4", ranksep="0.35", labelloc="b")
    seconds = _seconds(plan)
    for at, stage in enumerate(plan.stages):
        share = f"{100 * seconds[at] / sum(seconds):.0f} % of the work" if seconds[1:] else ""
        picture.node(
            f"stage{stage.index}",
            **_box(_stage(stage, share), 0.1),
            style="filled",
            fillcolor=tint(FORWARD, 1, 2),
            **(_RED if f"stage {stage.index}" in wrong else {}),
        )
    near = {(edge.source, edge.target) for edge in plan.edges}
    for before, after in pairwise(stage.index for stage in plan.stages):
        if (before, after) in near:  # others are side by side
            picture.edge(f"stage{before}", f"stage{after}", style="invis", weight="20")
    ways: dict[tuple[str, str, bool], list[Edge]] = {}
    numbers = {value: n for n, value in enumerate(dict.fromkeys(e.value for e in plan.edges))}
    back = {edge.back for edge in plan.edges}
    returning = {edge for edge in plan.gradients if edge in back}
    for edge in plan.edges:
        tail, head = f"stage{edge.source}", f"stage{edge.target}"
        if edge.source == HOST:
            tail = f"input{numbers[edge.value]}"
            _draw_value(picture, plan, tail, "input", edge)
        if edge.target == HOST:
            head = f"output{numbers[edge.value]}"
            _draw_value(picture, plan, head, "output", edge)
        ways.setdefault((tail, head, edge.back in returning), []).append(edge)
    for edge in plan.gradients:
        if edge not in back and HOST not in (edge.source, edge.target):
            ways.setdefault((f"stage{edge.source}", f"stage{edge.target}", False), []).append(edge)
    for (tail, head, gradient), edges in ways.items():
        _draw_way(picture, plan, tail, head, gradient, edges, wrong)
    picture.graph_attr.update(label=_table(_caption(plan, marks)), labeljust="l")
    picture.graph_attr["fontcolor"] = FAULT if marks.faults else INK
    return picture


def _seconds(plan: Plan) -> list[float]:
    """Stage → seconds per micro-batch; empty if some stage was not measured."""
    costs = [stage.costs for stage in plan.stages]
    seconds = [cost.forward + cost.backward for cost in costs if cost is not None]
    return seconds if len(seconds) == len(costs) and any(seconds) else []


def _stage(stage: Stage, share: str) -> list[str]:
    """The lines of a stage's box: number, share of the work, costs, modules and counts."""
    rows = [f"stage {stage.index}", share]
    if stage.costs is not None:
        forward, backward = time_text(stage.costs.forward), time_text(stage.costs.backward)
        rows.append(f"forward {forward} · backward {backward}")
    state = [_arguments(stage, stage.parameters, "parameter")]
    if stage.buffers:
        state.append(_arguments(stage, stage.buffers, "buffer"))
    work = [plural(sum(n.op.startswith("call") for n in stage.graph.graph.nodes), "operation")]
    if stage.calls:
        work.append("leaf modules")
    modules = lines(runs(stage.modules), _LINE, _MODULE_LINES)
    return [*rows, *modules, " · ".join(state), " · ".join(work)]


def _arguments(stage: Stage, arguments: Sequence[Argument], word: str) -> str:
    """``12 parameters (1.2 M elements)``; without the elements if a shape is unknown."""
    text = plural(len(arguments), word)
    graph = stage.graph.graph
    values = {node.name: node.meta.get("val") for node in graph.find_nodes(op="placeholder")}
    shapes: list[Any] = [getattr(values.get(x.name), "shape", (None,)) for x in arguments]
    if not shapes or not all(isinstance(size, int) for shape in shapes for size in shape):
        return text
    return f"{text} ({count_text(sum(map(prod, shapes)))} elements)"


def _draw_value(picture: Picture, plan: Plan, node: str, word: str, edge: Edge) -> None:
    """Draw an input from the caller or an output to it."""
    style = {"style": "filled,rounded", "fillcolor": INPUT, "color": FAINT}
    picture.node(node, **_box([word, _value(plan, edge)], 0.08), **style)


def _draw_way(
    picture: Picture,
    plan: Plan,
    tail: str,
    head: str,
    gradient: bool,
    edges: Sequence[Edge],
    wrong: Collection[str],
) -> None:
    """Draw one arrow for all values between the same two stages."""
    attributes: dict[str, str] = {"weight": "10"}
    rows = [_value(plan, edge) for edge in edges[:_VALUES]]
    if rest := edges[_VALUES:]:
        sizes = [plan.bytes_of(edge) for edge in rest]
        known = [size for size in sizes if size is not None]
        total = f", {bytes_text(sum(known))}" if len(known) == len(sizes) else ""
        rows.append(f"… and {len(rest)} more{total}")
    if edges[0].kind == "skip":
        rows.insert(0, "stash and pop")
        attributes = {"style": "dashed", "color": SKIP, "weight": "1"}
    if HOST not in (edges[0].source, edges[0].target):
        attributes["label"] = _table(rows, "&#160; ")  # apart from the arrow
    if gradient:
        attributes |= {"dir": "both", "arrowtail": "odot"}
    if any(f"edge {edge}" in wrong or f"value {edge.value}" in wrong for edge in edges):
        attributes |= _RED
    picture.edge(tail, head, **attributes)


def _value(plan: Plan, edge: Edge) -> str:
    """The name, shape and bytes of a value."""
    spec, name = plan.specs.get(edge.value), lines([edge.value], _NAME, 1)[0]
    if spec is None:
        return name
    return " · ".join([name, shape_text(spec.shape, spec.dtype), bytes_text(spec.bytes)])


def _caption(plan: Plan, marks: FaultMarks) -> list[str]:
    """The caption: counts, the meaning of the arrows, and the faults."""
    parameters = sum(len(stage.parameters) for stage in plan.stages)
    counts = f"{plural(len(plan.stages), 'stage')} · {plural(parameters, 'parameter')}"
    meanings = []
    if any(edge.kind == "skip" for edge in plan.edges):
        meanings.append("dashed: stashed and popped, past the stages between")
    if plan.gradients:
        meanings.append("ring: a gradient comes back")
    if plan.specs:
        meanings.append("sizes: of one micro-batch")
    if len(seconds := _seconds(plan)) > 1:
        ratio = max(seconds) * len(seconds) / sum(seconds)
        meanings.append(f"slowest stage: {ratio:.2f} times the mean")
    return [counts, " · ".join(meanings), *marks.listed]


def _box(rows: Sequence[str], margin: float) -> dict[str, str]:
    """The label of a box, which has room for it in a wide font, too; the margin is in inches."""
    wide = max(text_width(row, SIZE) for row in rows if row) / POINTS_PER_INCH + 2 * margin
    return {"label": _left(rows), "width": f"{wide:.3f}", "margin": f"{margin},{margin / 2:g}"}


def _table(rows: Iterable[str], indent: str = "") -> str:
    """A label of these lines, but for empty ones, that has room for them likewise."""
    shown = [printable(row) for row in rows if row]
    wide = max(text_width(indent + row, SIZE) for row in shown)
    cells = "".join(f'<TR><TD ALIGN="LEFT">{indent}{escape(row)}</TD></TR>' for row in shown)
    room = f'BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="0" WIDTH="{wide:.0f}"'
    return f"<<TABLE {room}>{cells}</TABLE>>"


def _left(rows: Iterable[str]) -> str:
    """A label of these lines, but for empty ones, each from the left."""
    return "".join(quoted(row) + r"\l" for row in rows if row)
