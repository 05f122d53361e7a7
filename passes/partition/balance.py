"""Assign nodes to stages by their costs, or cut at submodules that the user names.

``balance`` minimises the time of the slowest stage, then the bytes that are sent.

before:  a (3 s) → b (1 s) → c (2 s), two equal devices
after:   {"a": 0, "b": 1, "c": 1}

``cut_at`` begins a new stage at each named submodule.

before:  ["middle", "last"]
after:   stage 0: all before the first node of ``middle``;  stage 1: from there to ``last``; …
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx, nn

from fxpipe.errors import PartitionError, near
from fxpipe.formatting import bytes_text
from fxpipe.ir.called import calls_in
from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.assignment import (
    Assignment,
    bonds,
    constants,
    in_order,
    is_within,
)
from fxpipe.passes.partition.atoms import Footprint, atoms_of
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.passes.partition.solve import Partitioner
from fxpipe.passes.partition.work import (
    Division,
    StageDevices,
    weigh,
)


def balance(
    traced: Traced,
    stages: int,
    costs: Mapping[str, NodeCost],
    *,
    machine: StageDevices | None = None,
    footprint: Footprint | None = None,
    nearest: bool = False,
    partitioner: Partitioner | None = None,
) -> Assignment:
    """Cut into stages: minimise the time of the slowest, then the bytes that are sent.

    Args:
        machine: speeds, memory limits and links; by default equal devices.
        footprint: what stays in memory, for the limits.
        nearest: whether to return the cut that comes nearest to the memory limits, instead of
            raising, if no cut keeps them.
        partitioner: what divides the work; by default ``Partitioner`` itself.

    Raises:
        PartitionError: the graph cannot be cut into that many stages, or no cut keeps the limits.
    """
    machine = machine or StageDevices.equal(stages)
    atoms = atoms_of(traced, costs, footprint or Footprint())
    if len(atoms.nodes) < stages:
        raise PartitionError(
            f"the model can be cut into at most {len(atoms.nodes)} stages, not {stages}; "
            "give fewer devices"
        )
    partitioner = partitioner or Partitioner()
    division = partitioner.divide(atoms.work, machine)
    if division is None:
        division = partitioner.nearest(atoms.work, machine)
        if not nearest:
            raise PartitionError(_over(division, machine), limited=True)
    return Assignment(stages, atoms.named(division.stage_of), division.loads)


def judge(
    traced: Traced,
    assignment: Assignment,
    costs: Mapping[str, NodeCost],
    machine: StageDevices,
    footprint: Footprint,
    *,
    nearest: bool = False,
) -> Assignment:
    """Add the stages' loads to an assignment that was made by names.

    Raises:
        PartitionError: a stage exceeds its memory limit, and ``nearest`` is false.
    """
    atoms = atoms_of(traced, costs, footprint, views=False)
    stage_of = [assignment.nodes[nodes[0].name] for nodes in atoms.nodes]
    division = weigh(atoms.work, machine, stage_of)
    if not nearest and not division.fits(machine):
        raise PartitionError(_over(division, machine), limited=True)
    return replace(assignment, loads=division.loads)


def _over(division: Division, machine: StageDevices) -> str:
    """The message that no cut keeps the memory limits, for the division that comes nearest."""
    stage = max(range(machine.stages), key=lambda k: division.loads[k].memory / machine.limits[k])
    needs, limit = division.loads[stage].memory, machine.limits[stage]
    return (
        f"stage {stage} on {machine.name_of(stage)} needs {bytes_text(needs)} and may "
        f"take {bytes_text(limit)}: its parameters, their gradients, optimizer state and versions, "
        f"and what {machine.peaks[stage]} micro-batches in flight keep; "
        "raise memory_limits, or give more devices"
    )


def cut_at(
    traced: Traced,
    stages: int,
    at: Sequence[str],
    model: nn.Module,
) -> Assignment:
    """Cut by names of submodules: a new stage begins at each.

    Raises:
        PartitionError: a submodule does not exist, computes nothing, runs earlier than the one
            named before it, or is where no cut can be; or their number does not fit the stages.
    """
    if len(at) != stages - 1:
        raise PartitionError(
            f"partition names {len(at)} cuts, which make {len(at) + 1} stages, for "
            f"{stages} devices; name {stages - 1}"
        )
    nodes, constant = in_order(traced), constants(traced)
    place_of = {node: place for place, node in enumerate(nodes)}
    runs: list[tuple[int, int, str]] = []
    for bond in bonds(traced, nodes):
        places = [place_of[node] for node in bond.nodes]
        runs.append((min(places), max(places), bond.what))
    modules = [name for name, _ in model.named_modules() if name]
    cuts: list[int] = []
    for name in at:
        if name not in modules:
            raise PartitionError(f"partition names no submodule {name!r}: {near(name, modules)}")
        place = next((i for i, node in enumerate(nodes) if is_within(node, name)), None)
        if place is None:
            raise PartitionError(_nothing_of(name, nodes))
        while place and nodes[place - 1] in constant:  # made for this use, perhaps elsewhere
            place -= 1
        if cuts and place <= cuts[-1]:
            raise PartitionError(
                f"the cut at {name!r} does not come behind the one at {at[len(cuts) - 1]!r}, so "
                "that a stage between them would be empty, or an edge run backward; name the cuts "
                "in the order in which they run"
            )
        if why := _why_not(runs, nodes, place):
            raise PartitionError(f"no stage can begin at {name!r}: {why}")
        cuts.append(place)
    stage_of = {node.name: bisect.bisect_right(cuts, place) for node, place in place_of.items()}
    return Assignment(stages, stage_of)


def _nothing_of(name: str, nodes: Sequence[fx.Node]) -> str:
    """The message that a submodule has no nodes, with the reason and what to do."""
    inside = [function.name for function in calls_in(nodes).values()]
    for each in inside:
        if name.startswith(f"{each}."):
            return (
                f"submodule {name!r} is inside of {each!r}, which is called as it is, so that no "
                f"cut falls into it; cut at {each!r}"
            )
    if inside:
        return (
            f"submodule {name!r} computes nothing outside of what is called as it is, in one stage "
            f"({', '.join(map(repr, inside))}); cut at a submodule that is called before, or move "
            "the line that cannot be traced into a submodule"
        )
    return f"submodule {name!r} computes nothing; cut at another one"


def _why_not(runs: Sequence[tuple[int, int, str]], nodes: Sequence[fx.Node], place: int) -> str:
    """Why no stage can begin at a place; empty if one can."""
    for first, last, what in runs:
        if first < place <= last:
            return (
                f"{what} must be in one stage, from {nodes[first].name} to {nodes[last].name} on "
                "its two sides; cut before or after both"
            )
    return "" if place else "nothing runs before it; cut further on"
