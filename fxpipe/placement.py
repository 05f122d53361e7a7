"""Where the nodes of a model's graphs go: decided once, then kept for every further graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fxpipe.passes.cut import cut
from fxpipe.passes.differentiate import Differentiate, Wanted
from fxpipe.passes.measure import NodeCost, measure
from fxpipe.passes.measure_leaves import measure_leaves
from fxpipe.passes.partition import (
    Assignment,
    balance,
    compute_nodes,
    cut_at,
    owners,
    place_like,
)
from fxpipe.plan import Costs
from fxpipe.traced import Traced
from fxpipe.untouched import intra_op_threads, untouched


class Placement:
    """Assigns the nodes of each graph of a model to stages.

    The first graph is measured and cut; graphs of other modes and sizes follow it, so that a
    parameter never changes its stage.

    Attributes:
        owners: parameter or buffer, by its name in the model → the first stage that reads it.
        costs: stage → what it costs, as measured on the first graph.
    """

    def __init__(
        self, model: nn.Module, stages: int, partition: str | Sequence[str], threads: int
    ) -> None:
        """Nothing is placed yet.

        Args:
            model: the model, for the names of its submodules.
            stages: how many.
            partition: "auto", or the names of the submodules at which stages begin.
            threads: intra-op threads of a device, for the measurement.
        """
        self.owners: Mapping[str, int] = {}
        self.costs: Mapping[int, Costs] = {}
        self._model = model
        self._stages = stages
        self._partition = partition
        self._threads = threads
        self._reference: tuple[Traced, Assignment] | None = None

    def place(
        self,
        traced: Traced,
        values: Mapping[str, Any],
        state: Mapping[str, Tensor],
        wanted: Wanted,
    ) -> Assignment:
        """The stage of every node of a graph.

        Args:
            traced: the graph.
            values: an example of each input, by name.
            state: name in the model → parameter, buffer or constant.
            wanted: the gradients that will be made.

        Raises:
            PartitionError: the model cannot be cut as asked.
        """
        if self._reference is not None:
            return place_like(traced, *self._reference)
        with untouched(self._model), intra_op_threads(self._threads):
            costs = _measured(traced, values, state, wanted)
        if isinstance(self._partition, str):
            assignment = balance(traced, self._stages, costs)
        else:
            assignment = cut_at(traced, self._stages, self._partition, self._model)
        self._reference = traced, assignment
        self.owners = owners(traced, assignment)
        self.costs = _by_stage(traced, assignment, costs)
        return assignment


def _measured(
    traced: Traced, values: Mapping[str, Any], state: Mapping[str, Tensor], wanted: Wanted
) -> dict[str, NodeCost]:
    if traced.leaves:
        return measure_leaves(traced, values)
    whole = Assignment(1, {node.name: 0 for node in compute_nodes(traced.graph)})
    plan = Differentiate(values, state, wanted)(cut(traced, whole, {}))
    return measure(traced, plan, values, state)


def _by_stage(
    traced: Traced, assignment: Assignment, costs: Mapping[str, NodeCost]
) -> dict[int, Costs]:
    totals = [[0.0, 0.0] for _ in range(assignment.stages)]
    for node in compute_nodes(traced.graph):
        cost = costs[node.name]
        totals[assignment.nodes[node.name]][0] += cost.forward
        totals[assignment.nodes[node.name]][1] += cost.backward
    return {stage: Costs(*seconds) for stage, seconds in enumerate(totals)}
