"""Lower a schedule without a model: over a chain of stages that each hand one value to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import fx

from fxpipe.extend import find
from fxpipe.extensions.simulator.pairs import pairs_in, start_together
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.value import HOST, Edge
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower


def chain(
    stages: int, buckets: Mapping[int, Sequence[tuple[int, ...]]] | None = None, slices: int = 1
) -> Plan:
    """A plan of empty stages in a row: ``x`` → ``y0`` → ``y1`` → … → ``loss``.

    With slices, of which each has a row of its own, the rows end in the last stage.
    """
    row, last = stages // slices, stages - 1
    edges = tuple(Edge(HOST, stage, "x") for stage in range(0, stages, row))
    edges += tuple(
        Edge(s, s + 1 if (s + 1) % row else last, f"y{s}", gradient=True) for s in range(last)
    )
    edges += (Edge(last, HOST, "loss", gradient=True),)
    buckets, graph = buckets or {}, _empty()
    empty = [Stage(s, (), (), (), graph, buckets=tuple(buckets.get(s, ()))) for s in range(stages)]
    return Plan(tuple(empty), edges)


@cache
def _empty() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)


def chain_program(
    schedule: Schedule,
    *,
    frees: bool = True,
    replicas: int | None = None,
    buckets: Mapping[int, Sequence[tuple[int, ...]]] | None = None,
) -> Program:
    """Lower a verified schedule over a chain of stages.

    By default there are two ``replicas`` if it sums gradients, else one. ``buckets`` has those of
    the stages' gradients. If gradients are summed, each stage and copy without an A gets one.
    """
    if replicas is None:
        replicas = 2 if "A" in schedule.kinds and not schedule.copies else 1
    summed = schedule.trains and (replicas > 1 or any(schedule.working))
    if summed and "A" not in schedule.kinds:
        schedule = find("option", "add_reduce", "summing over replicas")(schedule)
    plan = chain(schedule.stages, buckets, schedule.slices)
    lower = Lower(plan, updates="U" in schedule.kinds, replicas=replicas)
    program = communicate(lower(schedule))
    if schedule.paired:
        program = start_together(program, pairs_in(schedule))
    return free(program) if frees else program
