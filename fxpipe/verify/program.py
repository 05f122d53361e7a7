"""Whether a program runs, and computes what its schedule says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fxpipe.errors import Fault, VerificationError
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import HOST, Edge, stage_name
from fxpipe.text.edge import is_name
from fxpipe.torchtools.state import without_collection
from fxpipe.verify import compute, flow, races
from fxpipe.verify.channels import Unstuck
from fxpipe.verify.facts import Facts
from fxpipe.verify.tasks import counts_faults

Rule = Callable[[Facts], Iterator[Fault]]

RULES: dict[str, tuple[Rule, ...]] = {
    "lower": (
        compute.tasks,
        compute.kept,
        compute.versions,
        compute.barriers,
        compute.meetings,
    ),
    "communicate": (flow.lives, flow.paired, flow.delivered, flow.paused),
}
"""Pass → what holds once it is done. That instructions are well-formed holds always, and once
frees are in place nothing is left of a batch."""

ORDERED: tuple[Rule, ...] = (races.recorded, races.races)
"""What holds of a program with streams, and is asked where nothing else is wrong."""


@without_collection()
def verify_program(program: Program, channel: int | None = None) -> Program:
    """Return the program, or raise VerificationError with every fault.

    It takes time in proportion to the number of instructions.

    Args:
        program: any.
        channel: how many values may be on their way from one device to another, as in Unstuck.

    Raises:
        VerificationError: with every fault.
        InputError: the channel is less than nothing.
    """
    unstuck = Unstuck(channel)
    faults = list(_frame(program)) or _faults(program, unstuck)
    if faults:
        raise VerificationError(f"program {program.name!r}", faults, program)
    return program


def _faults(program: Program, unstuck: Unstuck) -> list[Fault]:
    facts = Facts(program)
    faults = [facts.fault(*place, *wrong) for place, wrong in facts.wrong.items()]
    for name, rules in RULES.items():
        if name in program.passes:
            for rule in rules:
                faults.extend(rule(facts))
    if "communicate" in program.passes:
        faults.extend(unstuck(facts))
    if program.launches and not faults:
        for rule in ORDERED:
            faults.extend(rule(facts))
    return faults


def _frame(program: Program) -> Iterator[Fault]:
    """What is wrong with the counts, the placement and the edges.

    With any of these the instructions cannot be judged.
    """
    lists = program.lists
    older = (abs(x.version - x.batch) for own in lists for x in own if isinstance(x, ins.Compute))
    yield from counts_faults(
        program.microbatches,
        program.placement,
        program.devices,
        sum(map(len, lists)) if {"lower", "communicate"} & {*program.passes} else None,
        max(program.depth, max(older, default=0)),
    )
    if program.launches and list(map(len, program.launches)) != list(map(len, program.lists)):
        yield Fault(
            f"its devices have {_counts(program.launches)} launches for "
            f"{_counts(program.lists)} instructions",
            "give each instruction its launch, or none of them",
        )
    elif "streams" in program.passes and not program.launches and any(program.lists):
        yield Fault("its instructions have streams and no launches", "run the pass streams again")
    sources: dict[str, int] = {}
    known: set[tuple[str, int, int]] = set()
    for edge in program.edges:
        yield from _edge_faults(edge, program.stages)
        if sources.setdefault(edge.value, edge.source) != edge.source:
            yield Fault(
                f"{edge.value} is made by stages {stage_name(sources[edge.value])} and "
                f"{stage_name(edge.source)}",
                "give each value a name of its own",
                subject=f"edge {edge}",
            )
        if (edge.value, edge.source, edge.target) in known:
            yield Fault("there are two such edges", "keep one", subject=f"edge {edge}")
        known.add((edge.value, edge.source, edge.target))


def _counts(lists: Sequence[Sequence[object]]) -> str:
    return ", ".join(str(len(own)) for own in lists) or "no"


def _edge_faults(edge: Edge, stages: int) -> Iterator[Fault]:
    subject = f"edge {edge}"
    if not is_name(edge.value):
        yield Fault(
            f"{edge.value!r} is no name of a value", "give it an identifier", subject=subject
        )
    for end in (edge.source, edge.target):
        if end != HOST and not 0 <= end < stages:
            yield Fault(
                f"there is no stage {end}", f"name one of the {stages} stages", subject=subject
            )
    if edge.source == edge.target == HOST:
        yield Fault("it goes from the caller to the caller", "remove it", subject=subject)
    elif HOST not in (edge.source, edge.target) and edge.source >= edge.target:
        yield Fault("an edge runs forward", "let a later stage use the value", subject=subject)
