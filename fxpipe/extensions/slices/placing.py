"""Give each node of an unrolled graph its stage: slice c of stage s of S is stage c * S + s.

The nodes of slice 0 are divided among S stages, with the costs of their counterparts added. Then
each slice follows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxpipe.errors import InputError, PartitionError
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.assignment import (
    Assignment,
    bonds,
    compute_nodes,
    constants,
    in_order,
)
from fxpipe.passes.partition.cut import whole_modules
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.passes.partition.work import StageDevices
from fxpipe.torchtools.source import module_paths

Key = tuple[str, str, int]
"""A node's submodule, its operation, and its number among such nodes of its slice."""


@dataclass(frozen=True)
class Placing:
    """Passes that place the slices of a model like its first.

    Attributes:
        slices: how many there are.
        dim: the dimension of the sequence.
    """

    slices: int
    dim: int

    def divide_one_slice(
        self, stages: int, machine: StageDevices
    ) -> tuple[int, StageDevices, StageDevices]:
        """The stages and the machine of one slice, and the machine of all."""
        row = stages // self.slices
        return (
            row,
            replace(
                machine,
                speeds=machine.speeds[:row],
                peaks=machine.peaks[:row],
                arrived=machine.arrived[:row],
                reserved=machine.reserved[:row],
                per_byte=tuple(each[:row] for each in machine.per_byte[:row]),
                per_message=tuple(each[:row] for each in machine.per_message[:row]),
                names=machine.names[:row],
            ),
            machine,
        )

    def fold_costs(self, traced: Traced, costs: Mapping[str, NodeCost]) -> dict[str, NodeCost]:
        """The costs of nodes: slice 0 has those of its counterparts, too, which cost nothing."""
        parts = self._cut(traced)
        names = {key: node.name for key, node in _keyed(parts[0])}
        folded = dict(costs)
        for part in parts[1:]:
            for key, node in _keyed(part):
                if key not in names:
                    continue  # such as the loss
                one, more = folded[names[key]], costs[node.name]
                folded[names[key]] = replace(
                    one, forward=one.forward + more.forward, backward=one.backward + more.backward
                )
                folded[node.name] = NodeCost(0.0, 0.0, 0)
        return folded

    def spread_slices(
        self, traced: Traced, assignment: Assignment, whole_machine: StageDevices
    ) -> tuple[Assignment, StageDevices]:
        """Let every slice follow the first, which has been divided, and take the machine of all."""
        return self._follow_first(traced, assignment, assignment.stages), whole_machine

    def follow_slices(self, traced: Traced, assignment: Assignment) -> Assignment:
        """Let every slice of a further graph follow its first."""
        return self._follow_first(traced, assignment, assignment.stages // self.slices)

    def name_stages(self, traced: Traced, assignment: Assignment, plan: Plan) -> Plan:
        """Let the stages of all slices name the submodules that run in them, slice by slice."""
        row = assignment.stages // self.slices
        stage_of = {name: stage % row for name, stage in assignment.nodes.items()}
        names = [whole_modules(traced.graph, stage_of, stage) for stage in range(row)]
        stages = tuple(replace(stage, modules=names[stage.index % row]) for stage in plan.stages)
        return replace(plan, stages=stages)

    def refuse_draws(self, traced: Traced) -> None:
        """Raise InputError if a graph in slices draws random numbers."""
        if traced.seeded and self._cut(traced)[1:]:
            raise InputError(
                "the model draws random numbers, and slices would draw others than whole "
                "sequences, with which they are compared; set dropout to 0, or take a schedule "
                "without slices"
            )

    def _follow_first(self, traced: Traced, assignment: Assignment, row: int) -> Assignment:
        """Let every slice follow slice 0, whose nodes are on the first ``row`` stages. A graph that
        is not in slices keeps its stages.

        Raises:
            PartitionError: operations of several slices would have to share a stage.
        """
        depth: dict[fx.Node, int] = {}
        number: dict[fx.Node, int] = {}
        parts = self._cut(traced)
        known = {key: assignment.nodes[node.name] for key, node in _keyed(parts[0])}
        free = constants(traced)
        for index, part in enumerate(parts):
            alone = []
            for key, node in _keyed(part):
                number[node] = index
                sources = [depth[each] for each in node.all_input_nodes if each in depth]
                if key not in known or (index and node in free):
                    alone.append(node)
                    depth[node] = 0 if node in free else max(sources, default=0)
                else:
                    depth[node] = max([known[key], *sources])
            for node in reversed(alone):  # such as a mask: where it is read
                users = [user for user in part if user in node.users]
                where = [depth[user] for user in users[: 1 if node in free else None]]
                depth[node] = max(depth[node], min(where, default=0))
        stage_of = {node: number[node] * row + depth[node] for node in depth}
        for bond in bonds(traced, in_order(traced)):
            if len({stage_of[node] for node in bond.nodes}) > 1:
                raise PartitionError(
                    f"{bond.what} must be on one stage, and slices are stages of their own; take a "
                    "schedule without slices"
                )
        return Assignment(row * self.slices, {node.name: stage for node, stage in stage_of.items()})

    def _cut(self, traced: Traced) -> list[list[fx.Node]]:
        """Slice → its nodes; a single list if the graph is not in slices. Each slice begins where
        it is cut out of an input; the last has what follows, such as the loss."""
        inputs = {name for name in traced.inputs if name is not None}
        parts: list[list[fx.Node]] = [[]]
        for node in compute_nodes(traced.graph):
            if len(parts) < self.slices and self._cuts(node, inputs, len(parts)):
                parts.append([])
            parts[-1].append(node)
        return parts if len(parts) == self.slices else [compute_nodes(traced.graph)]

    def _cuts(self, node: fx.Node, inputs: Collection[str], number: int) -> bool:
        """Whether a node cuts slice ``number`` out of an input."""
        if node.target is not torch.ops.aten.slice.Tensor:
            return False
        value, *where = node.args
        if not isinstance(value, fx.Node) or value.name not in inputs:
            return False
        part = value.meta["val"].shape[self.dim] // self.slices
        return where == [self.dim, number * part, (number + 1) * part]


def _keyed(part: Sequence[fx.Node]) -> Iterator[tuple[Key, fx.Node]]:
    counts: Counter[tuple[str, str]] = Counter()
    for node in part:
        paths = module_paths(node)
        where = (paths[-1] if paths else "", str(node.target))
        yield (*where, counts[where]), node
        counts[where] += 1
