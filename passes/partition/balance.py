"""Assign nodes to stages by their costs: the fastest slowest stage, then the fewest bytes.

before:  a (3 s) → b (1 s) → c (2 s), two equal devices
after:   {"a": 0, "b": 1, "c": 1}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fxpipe.errors import PartitionError
from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.assignment import Assignment, Verdict
from fxpipe.passes.partition.atoms import Atoms, Footprint, atoms_of
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.passes.partition.solver.bound import lower_bound
from fxpipe.passes.partition.solver.solve import least_limits, solve
from fxpipe.passes.partition.work import Division, Machine, weigh
from fxpipe.words import bytes_text


def balance(
    traced: Traced,
    stages: int,
    costs: Mapping[str, NodeCost],
    *,
    machine: Machine | None = None,
    footprint: Footprint | None = None,
    together: Sequence[str] = (),
    nearest: bool = False,
) -> Assignment:
    """Cut into stages: minimise the time of the slowest, then the bytes that are sent.

    Args:
        traced: the graph.
        stages: how many.
        costs: node → what it costs.
        machine: speeds, memory limits and links; by default equal devices.
        footprint: what stays in memory, for the limits.
        together: submodules that must not be cut.
        nearest: whether to return the cut that comes nearest to the memory limits if none keeps
            them, instead of raising.

    Raises:
        PartitionError: the graph cannot be cut into that many stages, or no cut keeps the limits.
    """
    machine = machine or Machine.equal(stages)
    atoms = atoms_of(traced, costs, footprint or Footprint(), together)
    if len(atoms.nodes) < stages:
        raise PartitionError(
            f"the model can be cut into at most {len(atoms.nodes)} stages, not {stages}; "
            "give fewer devices"
        )
    solution = solve(atoms.work, machine, atoms.layers)
    if solution is not None:
        division, bound = solution.division, solution.bound
    else:
        division, bound = least_limits(atoms.work, machine), lower_bound(atoms.work, machine)
        if not nearest:
            raise PartitionError(_over(division, machine))
    verdict = Verdict(division.loads, bound, tuple(together))
    return Assignment(stages, _named(atoms, division), verdict)


def judge(
    traced: Traced,
    assignment: Assignment,
    costs: Mapping[str, NodeCost],
    machine: Machine,
    footprint: Footprint,
    *,
    nearest: bool = False,
) -> Assignment:
    """An assignment that was made by names, with its verdict; the bound holds for any cut.

    Raises:
        PartitionError: a stage exceeds its memory limit, and ``nearest`` is false.
    """
    atoms = atoms_of(traced, costs, footprint, views=False)
    stage_of = [assignment.nodes[nodes[0].name] for nodes in atoms.nodes]
    division = weigh(atoms.work, machine, stage_of)
    if not nearest and not division.fits(machine):
        raise PartitionError(_over(division, machine))
    return replace(assignment, verdict=Verdict(division.loads, lower_bound(atoms.work, machine)))


def _named(atoms: Atoms, division: Division) -> dict[str, int]:
    return {
        node.name: stage
        for nodes, stage in zip(atoms.nodes, division.stage_of, strict=True)
        for node in nodes
    }


def _over(division: Division, machine: Machine) -> str:
    """The error that memory limits are not kept, told by the division that comes nearest."""
    stage = max(range(machine.stages), key=lambda k: division.loads[k].memory / machine.limits[k])
    needs, limit = division.loads[stage].memory, machine.limits[stage]
    return (
        f"stage {stage} on {machine.name_of(stage)} needs at least {bytes_text(needs)} and may "
        f"take {bytes_text(limit)}: its parameters, their gradients, optimizer state and versions, "
        f"and what undoes its update, or what {machine.peaks[stage]} micro-batches in flight keep; "
        "raise memory_limits, or give more devices"
    )
