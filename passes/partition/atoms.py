"""Group the nodes of a graph into atoms, which are never cut, and weigh them.

before:  conv, view, getitem_0, getitem_1, mul     (nodes)
after:   [conv, view], [split, getitem_0, getitem_1], [mul]

Nodes that must share a stage (``bonds``) form an atom; a view also joins the tensor that it views,
if nothing else reads that. A tensor with several views, such as the cosines that rotate the keys of
every layer, is sent to the stages that read it: that takes less time than to compute it in each.
Nodes on a path between two nodes of an atom join it, so that the atoms have no cycle.

The readers of a value keep their ``turns``, so that the stages add gradients in autograd's order.
This can make the best cut slower.

Memory is estimated on the whole model as a single stage: parameters with their optimizer state, and
saved values. A value that is sent may count on both sides, because what a stage receives counts as
saved there, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import networkx
from torch import fx

from fxpipe.ir.traced import Traced
from fxpipe.passes.graph.aliasing import is_view
from fxpipe.passes.partition.assignment import (
    bonds,
    differentiable,
    in_order,
    readers,
    turns,
)
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.passes.partition.work import Transfer, Work, sorted_by_rank


@dataclass(frozen=True)
class Footprint:
    """What stays in memory.

    Attributes:
        resident: parameter or buffer, by its name in the model → bytes, with its gradient,
            optimizer state and versions.
        saved: node → bytes that it keeps for the backward of a micro-batch.
    """

    resident: Mapping[str, int] = field(default_factory=dict)
    saved: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Atoms:
    """The atoms of a graph, in an order in which every edge runs forward.

    Attributes:
        nodes: atom → its nodes, in the order of the program.
        work: the costs of the atoms.
    """

    nodes: tuple[tuple[fx.Node, ...], ...]
    work: Work

    def named(self, stage_of: Sequence[int]) -> dict[str, int]:
        """Turn atom → stage into node name → stage."""
        pairs = zip(self.nodes, stage_of, strict=True)
        return {node.name: stage for nodes, stage in pairs for node in nodes}


def atoms_of(
    traced: Traced,
    costs: Mapping[str, NodeCost],
    footprint: Footprint,
    *,
    views: bool = True,
) -> Atoms:
    """Return the atoms of a graph.

    Args:
        views: whether views stay with tensors that nothing else reads.
    """
    ordered = in_order(traced)
    trained = any(cost.backward for cost in costs.values())
    names = {argument.target: argument.name for argument in traced.parameters}
    back = differentiable(traced, names.values()) if trained else {}
    pairs = list(turns(traced, ordered))
    joined = [bond.nodes for bond in bonds(traced, ordered)] + ([*_views(ordered)] if views else [])
    groups = _joined(ordered, joined, pairs)
    atom_of = {node: atom for atom, group in enumerate(groups) for node in group}
    transfers = [
        Transfer(atom_of[node], tuple(sorted(others)), costs[node.name].bytes, node in back)
        for node in ordered
        if (others := {atom_of[user] for user in node.users if user in atom_of} - {atom_of[node]})
    ]
    in_turn = {(atom_of[first], atom_of[second]) for first, second in pairs}
    transfers += [Transfer(a, (b,), 0, False) for a, b in sorted(in_turn) if a != b]
    resident = [0] * len(groups)
    for target, users in readers(traced).items():
        atoms = tuple(sorted({atom_of[user] for user in users if user in atom_of}))
        held = footprint.resident.get(target, 0)
        if target in names and len(atoms) > 1:
            size = costs[names[target]].bytes if names[target] in costs else 0
            transfers.append(Transfer(None, atoms, size, trained, held))
        else:
            for atom in atoms:
                resident[atom] += held
    return Atoms(
        tuple(map(tuple, groups)),
        Work(
            tuple(sum(costs[node.name].seconds for node in group) for group in groups),
            tuple(resident),
            tuple(sum(footprint.saved.get(n.name, 0) for n in group) for group in groups),
            tuple(transfers),
        ),
    )


def _views(nodes: Iterable[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield each view with the tensor that it views, if that is computed and nothing else reads it.

    No stage needs this, but a view takes next to no time, and fewer atoms are divided faster.
    """
    for node in nodes:
        base = node.args[0] if node.args else None
        if is_view(node) and isinstance(base, fx.Node) and len(base.users) == 1:
            if base.op not in ("placeholder", "get_attr"):
                yield [base, node]


def _joined(
    nodes: Sequence[fx.Node],
    bound: Iterable[Sequence[fx.Node]],
    pairs: Iterable[tuple[fx.Node, fx.Node]],
) -> list[list[fx.Node]]:
    """Return the nodes in groups without a cycle between groups, in topological order.

    The nodes of each list in ``bound`` share a group. The first node of each of the ``pairs`` is
    in no later group than the second.
    """
    place = {node: index for index, node in enumerate(nodes)}
    sources = {
        index: {place[source] for source in node.all_input_nodes if source in place}
        for node, index in place.items()
    }
    for bond in bound:  # edges both ways make a cycle, so that a component holds all of the bond
        first, *others = (place[node] for node in bond)
        sources[first].update(others)
        for index in others:
            sources[index].add(first)
    for before, after in pairs:
        sources[place[after]].add(place[before])
    joined = networkx.strongly_connected_components(networkx.DiGraph(sources))
    group_of = {index: number for number, part in enumerate(joined) for index in part}
    groups: defaultdict[int, list[int]] = defaultdict(list)
    read: defaultdict[int, set[int]] = defaultdict(set)
    for index, group in sorted(group_of.items()):
        groups[group].append(index)
        read[group] |= {group_of[source] for source in sources[index]} - {group}
    # ties go by the program's order
    ordered = sorted_by_rank(read, lambda group, _: groups[group][0])
    return [[nodes[index] for index in groups[group]] for group in ordered]
