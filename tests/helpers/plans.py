"""Plans made by hand, of stages without work: for tests in which only the edges matter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import fx

from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import Task
from fxpipe.ir.value import HOST, Edge
from fxpipe.parts import Parts
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower

Item = TypeVar("Item", Task, ins.Instruction)


def run(value: Schedule | Program, *passes: Callable[[Any], Program]) -> Program:
    """Hand a schedule or a program from pass to pass; verify it before the first and after each."""
    value.verify()
    for made_by in passes:
        value = made_by(value).verify()
    assert isinstance(value, Program)
    return value


def chain(stages: int) -> Plan:
    """Input ``x`` → ``y0`` → ``y1`` → … → ``loss``, one value from each stage to the next."""
    values = ["x", *(f"y{stage}" for stage in range(stages - 1)), "loss"]
    ends = [HOST, *range(stages), HOST]
    ways = [(ends[k], ends[k + 1], value) for k, value in enumerate(values)]
    return plan_of(
        stages, Edge(*ways[0]), *itertools.chain.from_iterable(both(*way) for way in ways[1:])
    )


def along(schedule: Schedule) -> Plan:
    """Stages of which each hands one value to those that it feeds, by the schedule's edges."""
    pairs = schedule.edges or ()
    edges = [edge for source, target in pairs for edge in both(source, target, f"y{source}")]
    for stage in range(schedule.stages):
        if all(target != stage for _, target in pairs):
            edges.append(Edge(HOST, stage, "x"))
        if all(source != stage for source, _ in pairs):
            edges += both(stage, HOST, f"y{stage}")
    return plan_of(schedule.stages, *edges)


def chain_program(
    schedule: Schedule,
    *,
    replicas: int = 1,
    buckets: Mapping[int, Sequence[tuple[int, ...]]] | None = None,
) -> Program:
    """A schedule lowered over a chain, or over its edges; several replicas sum their gradients, in
    these buckets."""
    plan = chain(schedule.stages) if schedule.edges is None else along(schedule)
    if buckets is not None:
        parted = [replace(s, buckets=tuple(buckets.get(s.index, ()))) for s in plan.stages]
        plan = replace(plan, stages=tuple(parted))
    schedule = add_reduce(schedule) if replicas > 1 else schedule
    lower = Lower(plan, updates="U" in schedule.kinds, replicas=replicas)
    return free(communicate(lower(schedule)))


def end_with_flush(schedule: Schedule) -> Schedule:
    """The schedule with a flush, by the extension of overlapping batches."""
    ended: Schedule = Parts.end_with_flush.find()(schedule)
    return ended


def add_reduce(schedule: Schedule) -> Schedule:
    """The schedule with reduces, by the extension that sums over replicas."""
    reduced: Schedule = Parts.add_reduce.find()(schedule)
    return reduced


def add_clip(schedule: Schedule) -> Schedule:
    """The schedule with clips, by the extension that clips."""
    clipped: Schedule = Parts.add_clip.find()(schedule)
    return clipped


def in_turn(window: Sequence[Item], steps: int, depth: int) -> Iterator[tuple[int, Item]]:
    """The tasks or instructions of a device that repeats its window, over some steps and the flush
    behind them: each with the step in which it runs."""
    return (
        (step, x) for step in range(steps + depth) for x in window if 0 <= step + x.batch < steps
    )


def skipping(stages: int) -> Plan:
    """A chain with all that an edge can be, for at least 3 stages.

    Stage 0 makes ``h`` for the last stage and for stage 1, and ``size``, which carries no
    gradient, for the last; targets ``t`` enter at the last stage; ``x`` wants its gradient; the
    last stage gives ``out`` besides the loss.
    """
    last = stages - 1
    plan = chain(stages)
    entry, *middle, loss = plan.edges
    returning = [edge.back for edge in (*middle, loss)]
    return plan_of(
        stages,
        *both(entry.source, entry.target, entry.value),
        Edge(HOST, last, "t"),
        *both(0, last, "h"),
        *both(0, 1, "h"),
        Edge(0, last, "size"),
        *middle,
        Edge(last, HOST, "out"),
        loss,
        *returning,
    )


def plan_of(stages: int, *edges: Edge) -> Plan:
    """A plan of empty stages with these edges, those of gradients among them."""
    graph = _empty()
    forward = tuple(edge for edge in edges if not edge.gradient)
    back = tuple(edge for edge in edges if edge.gradient)
    return Plan(tuple(Stage(index, (), (), (), graph) for index in range(stages)), forward, back)


def both(source: int, target: int, value: str) -> tuple[Edge, Edge]:
    """The edge of a value, and that of its gradient."""
    edge = Edge(source, target, value)
    return edge, edge.back


@cache
def _empty() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)
