"""The verifier of a Plan: edges, ownership, and each stage's graph against its edges.

It reports every fault at once, and looks at each node and each edge a fixed number of times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from fxpipe.errors import Fault, VerificationError
from fxpipe.ir.plan import Argument, Plan
from fxpipe.ir.value import HOST, Edge, stage_name
from fxpipe.verify.graph import verify_graph


def verify_plan(plan: Plan) -> Plan:
    """Return the plan, or raise VerificationError with every fault in it."""
    faults = [*_stages(plan), *_edges(plan), *_values(plan), *_parameters(plan), *_buffers(plan)]
    into: list[list[Edge]] = [[] for _ in plan.stages]
    out_of: list[list[Edge]] = [[] for _ in plan.stages]
    for edge in plan.edges:
        if _runs_forward(edge, len(plan.stages)):
            if edge.target != HOST:
                into[edge.target].append(edge)
            if edge.source != HOST:
                out_of[edge.source].append(edge)
    for position, stage in enumerate(plan.stages):
        faults += verify_graph(stage, position, into[position], out_of[position])
    if faults:
        raise VerificationError("the plan", faults, plan)
    return plan


def _stages(plan: Plan) -> Iterator[Fault]:
    if not plan.stages:
        yield Fault("there is no stage", "give the plan at least one")
    for position, stage in enumerate(plan.stages):
        if stage.index != position:
            yield Fault(
                f"stands at place {position}, but has the index {stage.index}",
                "number the stages from 0 in pipeline order",
                subject=f"stage {stage.index}",
            )


def _runs_forward(edge: Edge, stages: int) -> bool:
    if not (HOST <= edge.source < stages and HOST <= edge.target < stages):
        return False
    if HOST in (edge.source, edge.target):
        return edge.source != edge.target
    return edge.source < edge.target


def _edges(plan: Plan) -> Iterator[Fault]:
    count = len(plan.stages)
    seen: set[tuple[int, int, str]] = set()
    for edge in plan.edges:
        subject = f"edge {edge}"
        for end in dict.fromkeys((edge.source, edge.target)):
            if not HOST <= end < count:
                yield Fault(
                    f"stage {end} does not exist",
                    f"an edge goes between the host and the stages 0 to {count - 1}",
                    subject=subject,
                )
        if edge.source == edge.target:
            yield Fault("starts where it ends", "remove it", subject=subject)
        elif HOST not in (edge.source, edge.target) and edge.source > edge.target:
            yield Fault(
                "runs backward", "make the value no later than where it is used", subject=subject
            )
        key = (edge.source, edge.target, edge.value)
        if key in seen:
            yield Fault(
                "stands in the plan twice", "one edge carries a value to a stage", subject=subject
            )
        seen.add(key)
        spec = plan.specs.get(edge.value)
        if edge.gradient and spec is not None and not _differentiable(spec.dtype):
            yield Fault(
                f"a value of type {spec.dtype} has no gradient",
                "leave out 'gradient'",
                subject=subject,
            )


def _differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _values(plan: Plan) -> Iterator[Fault]:
    """Each value that crosses has one producer."""
    producers: dict[str, dict[int, None]] = {}
    for edge in plan.edges:
        producers.setdefault(edge.value, {})[edge.source] = None
    for value, sources in producers.items():
        if len(sources) > 1:
            yield Fault(
                f"comes from {_stages_text(sources)}",
                "send a value straight from the stage that makes it, and give a copy of an input "
                "a name of its own",
                subject=f"value {value}",
            )


def _parameters(plan: Plan) -> Iterator[Fault]:
    for target, owners in _by_target(stage.parameters for stage in plan.stages).items():
        if len(owners) > 1:
            yield Fault(
                f"is owned {_by_stages(owners)}",
                "let the first stage that uses it own it, once, and send it to the others",
                subject=f"parameter {target}",
            )


def _buffers(plan: Plan) -> Iterator[Fault]:
    readers = _by_target(stage.buffers for stage in plan.stages)
    writers: dict[str, list[int]] = {}
    for position, stage in enumerate(plan.stages):
        for write in stage.writes:
            writers.setdefault(write.target, []).append(position)
    for target, stages in writers.items():
        subject = f"buffer {target}"
        if len(stages) > 1:
            yield Fault(
                f"is written {_by_stages(stages)}",
                "put all that writes it into one stage, and write it once",
                subject=subject,
            )
        others = [reader for reader in readers.get(target, []) if reader not in stages]
        if others:
            yield Fault(
                f"is written {_by_stages(stages)} and read {_by_stages(others)}",
                "put all that reads it into the stage that writes it",
                subject=subject,
            )


def _by_target(stages: Iterable[tuple[Argument, ...]]) -> dict[str, list[int]]:
    """Name in the model → the stages that hold it, one entry for each time."""
    found: dict[str, list[int]] = {}
    for position, arguments in enumerate(stages):
        for argument in arguments:
            found.setdefault(argument.target, []).append(position)
    return found


def _by_stages(stages: Iterable[int]) -> str:
    counts = Counter(stages)
    parts = (f"stage {stage}" + (f" {n} times" if n > 1 else "") for stage, n in counts.items())
    return "by " + " and ".join(parts)


def _stages_text(stages: Iterable[int]) -> str:
    return " and ".join(
        "the host" if stage == HOST else f"stage {stage_name(stage)}" for stage in stages
    )
