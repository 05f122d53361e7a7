"""Group the nodes of a graph into atoms, which are never cut, with the values between them.

before:  conv, view, getitem_0, getitem_1, mul     (nodes)
after:   [conv, view], [split, getitem_0, getitem_1], [mul]

Nodes that must share a stage (``bonds``) form an atom; a view also joins the tensor that it shows.
Nodes on a path between two nodes of an atom join it, so that the atoms have no cycle.

The readers of one value stay in the order of the program: none is in an earlier stage than a reader
before it. Autograd adds their gradients from the last to the first, and the stages must add them in
the same order. This can make the best cut slower, with ``together`` much slower; the bounds that
are proven hold for cuts that keep this order.

What stays in memory, parameters with their optimizer state and saved values, is estimated on the
whole model as a single stage. A value that is sent from stage to stage may be kept by both, because
what a stage receives counts as saved there, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.differentiate.joint import ORIGIN
from fxpipe.passes.partition.assignment import (
    bonds,
    compute_nodes,
    differentiable,
    in_order,
    kept_together,
    module_paths,
    readers,
)
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.passes.partition.work import Transfer, Work, sorted_by_rank
from fxpipe.passes.tracing.symbolic import is_view
from fxpipe.torchtools.pytrees import memory, size_in_bytes


@dataclass(frozen=True)
class Footprint:
    """What stays in memory.

    Attributes:
        resident: parameter or buffer, by its name in the model → bytes, with its gradient,
            optimizer state and versions.
        saved: node → bytes that it keeps for the backward of a micro-batch.
        undo: parameter → bytes that are kept after its update, to be able to undo it. By then the
            backward's saved values are freed.
    """

    resident: Mapping[str, int] = field(default_factory=dict)
    saved: Mapping[str, int] = field(default_factory=dict)
    undo: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Atoms:
    """The atoms of a graph, in an order in which every edge runs forward.

    Attributes:
        nodes: atom → its nodes, in the order of the program.
        work: the costs of the atoms.
        layers: atom → the outermost submodule that it belongs to, or else its first node.
    """

    nodes: tuple[tuple[fx.Node, ...], ...]
    work: Work
    layers: tuple[str, ...]

    def named(self, stage_of: Sequence[int]) -> dict[str, int]:
        """Node name → stage, from atom → stage."""
        placed = zip(self.nodes, stage_of, strict=True)
        return {node.name: stage for nodes, stage in placed for node in nodes}


def atoms_of(
    traced: Traced,
    costs: Mapping[str, NodeCost],
    footprint: Footprint,
    together: Sequence[str] = (),
    *,
    views: bool = True,
) -> Atoms:
    """The atoms of a graph. No cut may part ``together``; ``views`` stay with what they show."""
    ordered = in_order(traced)
    bound = [*bonds(traced, ordered), *kept_together(ordered, together)]
    trained = any(cost.backward for cost in costs.values())
    names = {argument.target: argument.name for argument in traced.parameters}
    back = differentiable(traced, names.values()) if trained else {}
    turns = list(_turns(traced, ordered, back))
    groups = _joined(ordered, [*bound, *_views(ordered)] if views else bound, turns)
    atom_of = {node: atom for atom, group in enumerate(groups) for node in group}
    transfers = list(_values(ordered, costs, atom_of, back))
    in_turn = {(atom_of[first], atom_of[second]) for first, second in turns}
    transfers += [Transfer(a, (b,), 0, False) for a, b in sorted(in_turn) if a != b]
    resident, undo = [0] * len(groups), [0] * len(groups)
    for target, users in readers(traced).items():
        atoms = tuple(sorted({atom_of[user] for user in users if user in atom_of}))
        held, undoing = footprint.resident.get(target, 0), footprint.undo.get(target, 0)
        if target in names and len(atoms) > 1:
            size = costs[names[target]].bytes if names[target] in costs else 0
            transfers.append(Transfer(None, atoms, size, trained, held, undoing))
        else:
            for atom in atoms:
                resident[atom] += held
                undo[atom] += undoing
    return Atoms(
        tuple(map(tuple, groups)),
        Work(
            tuple(sum(costs[node.name].seconds for node in group) for group in groups),
            tuple(resident),
            tuple(sum(footprint.saved.get(n.name, 0) for n in group) for group in groups),
            tuple(transfers),
            tuple(undo),
        ),
        tuple((module_paths(group[0]) or [group[0].name])[0] for group in groups),
    )


def _values(
    nodes: Iterable[fx.Node],
    costs: Mapping[str, NodeCost],
    atom_of: Mapping[fx.Node, int],
    back: Container[fx.Node],
) -> Iterator[Transfer]:
    for node in nodes:
        atom = atom_of[node]
        others = {atom_of[user] for user in node.users if user in atom_of} - {atom}
        if others:
            size = costs[node.name].bytes
            yield Transfer(atom, tuple(sorted(others)), size, node in back)


def _turns(
    traced: Traced, ordered: Sequence[fx.Node], back: Container[fx.Node]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each pair of consecutive readers of a value that both send a gradient back to it."""
    place = {node: index for index, node in enumerate(ordered)}
    for node in traced.graph.nodes:
        if node in back:
            users = [user for user in node.users if user in place and user in back]
            yield from itertools.pairwise(sorted(users, key=place.__getitem__))


def _views(nodes: Iterable[fx.Node]) -> Iterator[list[fx.Node]]:
    """Each view with the tensor that it shows, where that is computed."""
    for node in nodes:
        shown = node.args[0] if node.args else None
        if is_view(node) and isinstance(shown, fx.Node):
            if shown.op not in ("placeholder", "get_attr"):
                yield [shown, node]


def _joined(
    nodes: Sequence[fx.Node],
    bound: Iterable[Sequence[fx.Node]],
    turns: Iterable[tuple[fx.Node, fx.Node]],
) -> list[list[fx.Node]]:
    """The nodes in groups, with no cycle between groups.

    Each list of ``bound`` shares a group. Of each pair of ``turns`` the first is in no later group
    than the second.
    """
    number = {node: index for index, node in enumerate(nodes)}
    root = list(range(len(nodes)))

    def find(index: int) -> int:
        while root[index] != index:
            root[index] = root[root[index]]
            index = root[index]
        return index

    for bond in bound:
        for node in bond[1:]:
            root[find(number[node])] = find(number[bond[0]])
    group_of = [find(index) for index in range(len(nodes))]
    sources: dict[int, set[int]] = {group: set() for group in group_of}
    for index, node in enumerate(nodes):
        for source in node.all_input_nodes:
            if source in number and group_of[number[source]] != group_of[index]:
                sources[group_of[index]].add(group_of[number[source]])
    for first, second in turns:
        if group_of[number[first]] != group_of[number[second]]:
            sources[group_of[number[second]]].add(group_of[number[first]])
    part_of = {group: number for number, part in enumerate(_connected(sources)) for group in part}
    parts: dict[int, list[int]] = {}
    for index, group in enumerate(group_of):
        parts.setdefault(part_of[group], []).append(index)
    before: dict[int, set[int]] = {part: set() for part in parts}
    for group, others in sources.items():
        before[part_of[group]] |= {part_of[other] for other in others} - {part_of[group]}
    # each after those that it reads, and else as the program has them
    ordered = sorted_by_rank(before, lambda part, _: parts[part][0])
    return [[nodes[index] for index in parts[part]] for part in ordered]


def _connected(sources: Mapping[int, set[int]]) -> Iterator[list[int]]:
    """The strongly connected components of a graph (Kosaraju, 1978)."""
    readers: dict[int, list[int]] = {group: [] for group in sources}
    for group, others in sources.items():
        for other in others:
            readers[other].append(group)
    ends = itertools.chain.from_iterable(_walks(sources, sources))
    return _walks(readers, reversed([*ends]))


def _walks(following: Mapping[int, Iterable[int]], starts: Iterable[int]) -> Iterator[list[int]]:
    """For each start, what only it leads to so far, itself included, each item after all that it
    leads to."""
    seen: set[int] = set()
    for start in starts:
        found: list[int] = []
        path = [(start, iter(following[start]))] if start not in seen else []
        seen.add(start)
        while path:
            other = next((each for each in path[-1][1] if each not in seen), None)
            if other is None:
                found.append(path.pop()[0])
            else:
                seen.add(other)
                path.append((other, iter(following[other])))
        if found:
            yield found


def footprint_of(
    traced: Traced,
    plan: Plan | None,
    costs: Mapping[str, NodeCost],
    state: Mapping[str, Tensor],
    copies: float,
    undo: float = 0.0,
) -> Footprint:
    """What each parameter and buffer occupies, and what each node keeps for a micro-batch.

    Args:
        plan: the same graph as a single stage, differentiated; None for a graph with leaf modules,
            of which every value counts as saved.
        copies: how many tensors of its size a trained parameter needs: its versions, its gradient
            and its optimizer state.
        undo: how many more it needs after its update, to be able to undo it, when the saved values
            are freed.
    """
    trained = {
        argument.target for argument in traced.parameters if state[argument.target].requires_grad
    }
    resident = {
        a.target: int(size_in_bytes(state[a.target]) * (copies if a.target in trained else 1))
        for a in (*traced.parameters, *traced.buffers)
    }
    undoing = {target: int(size_in_bytes(state[target]) * undo) for target in trained}
    if plan is not None:
        return Footprint(resident, _saved(plan), undoing)
    kept = {node.name: costs[node.name].bytes for node in compute_nodes(traced.graph)}
    return Footprint(resident, kept, undoing)


def _saved(plan: Plan) -> dict[str, int]:
    """Node → bytes of the saved tensors that it makes; views of one memory count once."""
    (stage,) = plan.stages
    kernel = stage.kernel
    assert isinstance(kernel, GraphKernel)
    graph = kernel.forward_graph.graph
    seen = {_memory(node) for node in graph.nodes if node.op == "placeholder"}
    returned: Any = graph.output_node().args[0]
    saved: dict[str, int] = {}
    for node in returned[kernel.outputs + kernel.writes :]:
        value = node.meta.get("val")
        if node.op == "placeholder" or not isinstance(value, Tensor) or _memory(node) in seen:
            continue
        seen.add(_memory(node))
        origin = node.meta.get("custom", {}).get(ORIGIN, "")
        saved[origin] = saved.get(origin, 0) + size_in_bytes(value)
    return saved


def _memory(node: torch.fx.Node) -> int | None:
    value = node.meta.get("val")
    return memory(value) if isinstance(value, Tensor) else None
