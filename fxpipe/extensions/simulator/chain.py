"""Lower a schedule without a model: over stages that hand one value to each that they feed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from operator import lt as less
from types import MappingProxyType

import torch
from torch import fx

from fxpipe.errors import InputError
from fxpipe.extensions.simulator.pairs import pairs_in, start_together
from fxpipe.ir.plan import Plan, Stage
from fxpipe.ir.program import Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.value import HOST, Edge
from fxpipe.parts import Parts
from fxpipe.passes.lowering.communicate import communicate
from fxpipe.passes.lowering.free import free
from fxpipe.passes.lowering.lower import Lower

Edges = Mapping[str, tuple[int, int]]
"""Name of a value → the stage that makes it, and the later one that reads it, too."""


def plan_for(
    schedule: Schedule,
    buckets: Mapping[int, Sequence[tuple[int, ...]]] | None = None,
    skips: Edges = MappingProxyType({}),
) -> Plan:
    """A plan of empty stages for a schedule: in a chain ``x`` → ``y0`` → ``y1`` → … → ``loss``, and
    with the ``skips``.

    Stages that none feeds read ``x``; those that feed none go to the caller. With slices, of which
    each has a row of its own, the rows end in those of the last slice.

    Raises:
        InputError: a skip has a name that is taken, or does not lead to a later stage.
    """
    row, last = schedule.stages // schedule.slices, schedule.stages - 1
    edges: list[Edge] = []
    for stage in range(schedule.stages):
        first = stage - stage % row
        if not any(source >= first for source in schedule.beside[0][stage]):
            edges.append(Edge(HOST, stage, "x"))
        near = [target for target in schedule.beside[1][stage] if target < first + row]
        if not near:
            near = [last - row + 1 + stage % row if stage <= last - row else HOST]
        value = "loss" if stage == last else f"y{stage}"
        edges += [Edge(stage, target, value) for target in near]
    taken = {edge.value for edge in edges}
    for name, ends in skips.items():
        pair = isinstance(ends, tuple) and len(ends) == 2
        if not pair or not all(end in range(schedule.stages) for end in ends) or not less(*ends):
            raise InputError(
                f"edges has {name!r}: {ends!r}; give a stage and a later one, of the stages 0 to "
                f"{last}"
            )
        if name in taken or not isinstance(name, str):
            raise InputError(f"edges has {name!r}, which is taken; give the value another name")
        edges.append(Edge(*ends, name))
    buckets, graph = buckets or {}, _empty()
    empty = [
        Stage(s, (), (), (), graph, buckets=tuple(buckets.get(s, ())))
        for s in range(schedule.stages)
    ]
    gradients = tuple(edge.back for edge in edges if edge.source != HOST)
    return Plan(tuple(empty), tuple(edges), gradients)


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
    skips: Edges = MappingProxyType({}),
) -> Program:
    """Lower a verified schedule over empty stages, with ``skips`` as in ``plan_for``.

    By default there are two ``replicas`` if it sums gradients, else one. ``buckets`` has those of
    the stages' gradients. If gradients are summed, each stage and copy without an A gets one.
    """
    if replicas is None:
        replicas = 2 if "A" in schedule.kinds and not schedule.copies else 1
    summed = schedule.trains and (replicas > 1 or any(schedule.working))
    if summed and "A" not in schedule.kinds:
        schedule = Parts.add_reduce.find("summing over replicas")(schedule)
    lower = Lower(
        plan_for(schedule, buckets, skips), updates="U" in schedule.kinds, replicas=replicas
    )
    program = communicate(lower(schedule))
    if schedule.paired:
        program = start_together(program, pairs_in(schedule))
    return free(program) if frees else program
