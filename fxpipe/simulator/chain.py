"""A schedule as a program without a model: stages that each hand one value to the next."""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.value import HOST, Edge


def chain(stages: int) -> Plan:
    """Input ``x`` → ``y0`` → ``y1`` → … → ``loss``; the stages have no work in them."""
    values = ["x", *(f"y{stage}" for stage in range(stages - 1)), "loss"]
    ends = [HOST, *range(stages), HOST]
    edges = tuple(
        Edge(ends[k], ends[k + 1], value, gradient=k > 0) for k, value in enumerate(values)
    )
    return Plan(tuple(map(_empty, range(stages))), edges)


def chain_program(schedule: Schedule, *, frees: bool = True) -> Program:
    """Lower a verified schedule over a chain, with or without the frees."""
    from fxpipe.passes.lowering.communicate import communicate
    from fxpipe.passes.lowering.free import free
    from fxpipe.passes.lowering.lower import Lower

    lower = Lower(chain(schedule.stages), updates="U" in schedule.kinds)
    program = communicate(lower(schedule))
    return free(program) if frees else program


def _empty(index: int) -> Stage:
    graph = fx.Graph()
    graph.output(())
    return Stage(index, (), (), (), fx.GraphModule(torch.nn.Module(), graph))
