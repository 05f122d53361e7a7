"""Assign a further graph of a model, of another mode or size, to stages like the first graph."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxpipe.errors import PartitionError
from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.assignment import (
    Assignment,
    bonds,
    compute_nodes,
    in_order,
    module_paths,
    owners,
    readers,
)


def place_like(traced: Traced, reference: Traced, assignment: Assignment) -> Assignment:
    """The same assignment for another graph of the same model, such as that of eval mode.

    A node gets the stage of the same call in the same submodule of the reference. Parameters stay
    on their stage. A node without a counterpart gets the stage of its inputs.

    Raises:
        PartitionError: a leaf module that was none in the reference has weights on two stages.
    """
    parameter_stage = owners(reference, assignment)
    read: dict[str, list[int]] = {}
    for target, nodes in readers(traced).items():
        for node in nodes:
            if target in parameter_stage:
                read.setdefault(node.name, []).append(parameter_stage[target])
    by_call: dict[tuple[str, str, int], int] = {}
    for key, node in _calls(compute_nodes(reference.graph)):
        by_call[key] = assignment.nodes[node.name]
    by_module: dict[str, int] = {}
    for (module, _, _), stage in by_call.items():
        by_module[module] = min(stage, by_module.get(module, stage))
    placed: dict[str, int] = {}
    for key, node in _calls(compute_nodes(traced.graph)):
        floor = [placed[n.name] for n in node.all_input_nodes if n.name in placed]
        earliest = max([*floor, *read.get(node.name, [])], default=0)
        unknown = earliest if node.name in read else by_module.get(key[0], earliest)
        wish = by_call.get(key, unknown)
        placed[node.name] = max(wish, earliest)
    _settle(traced, placed)
    for node in compute_nodes(traced.graph):
        stages = {placed[node.name], *read.get(node.name, [])}
        if node.op == "call_module" and len(stages) > 1:
            raise PartitionError(
                f"submodule {node.target!r} is called as it is, in one stage, and the model was "
                "cut inside of it for a call that came before, where that was not needed; let a "
                "step come first, as with compile(..., example=...), or give compile(..., "
                f"leaf_modules=[{node.target!r}])"
            )
    return Assignment(assignment.stages, placed)


def _calls(nodes: Sequence[fx.Node]) -> list[tuple[tuple[str, str, int], fx.Node]]:
    """Each node with its key: its submodule, its operation, and its number among the nodes of that
    operation in that submodule."""
    counts: dict[tuple[str, str], int] = {}
    keyed: list[tuple[tuple[str, str, int], fx.Node]] = []
    for node in nodes:
        paths = module_paths(node)
        where = (paths[-1] if paths else "", str(node.target))
        counts[where] = counts.get(where, -1) + 1
        keyed.append(((*where, counts[where]), node))
    return keyed


def _settle(traced: Traced, placed: dict[str, int]) -> None:
    """Move nodes to later stages until every edge runs forward and each of ``bonds`` is kept."""
    nodes = in_order(traced)
    bound = [[node.name for node in bond] for bond in bonds(traced, nodes)]
    moved = True
    while moved:
        moved = False
        for node in nodes:
            floor = max(
                (placed[n.name] for n in node.all_input_nodes if n.name in placed), default=0
            )
            if placed[node.name] < floor:
                placed[node.name], moved = floor, True
        for bond in bound:
            latest = max(placed[name] for name in bond)
            for name in bond:
                if placed[name] < latest:
                    placed[name], moved = latest, True
