"""Where the nodes of a model's graphs go: decided once, then kept for every further graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from fxpipe.compiler.room import Room
from fxpipe.compiler.timetable import Timetable
from fxpipe.ir.plan import Costs, Plan
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import Traced
from fxpipe.log import telling
from fxpipe.memory.held import undo_bytes
from fxpipe.passes.differentiate.differentiate import Differentiate, Wanted
from fxpipe.passes.differentiate.part_backward import part_backward
from fxpipe.passes.partition.assignment import Assignment, Verdict, compute_nodes, owners
from fxpipe.passes.partition.atoms import Footprint
from fxpipe.passes.partition.balance import balance, judge
from fxpipe.passes.partition.cut import cut
from fxpipe.passes.partition.follow import place_like
from fxpipe.passes.partition.footprint import footprint_of
from fxpipe.passes.partition.measure import NodeCost, measure
from fxpipe.passes.partition.measure_leaves import measure_leaves
from fxpipe.passes.partition.named_cuts import cut_at
from fxpipe.passes.partition.options import Partition
from fxpipe.passes.partition.work import Machine
from fxpipe.runtime.weights.optimizer import OptimizerFactory, state_size
from fxpipe.torchtools.untouched import intra_op_threads, untouched


class Placement:
    """Assigns the nodes of each graph of a model to stages.

    The first graph is measured and cut; graphs of other modes and sizes follow it, so that a
    parameter never changes its stage.

    Attributes:
        owners: parameter or buffer, by its name in the model → the first stage that reads it.
        costs: stage → what it costs, as measured on the first graph.
    """

    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        timetable: Timetable,
        devices: Sequence[str],
        optimizer: OptimizerFactory | None,
        threads: int,
    ) -> None:
        """Nothing is placed yet.

        Args:
            model: the model, for the names of its submodules.
            partition: what to mind.
            timetable: the schedule of training steps, which places the stages.
            devices: what messages call them.
            optimizer: for the size of its state.
            threads: intra-op threads of a device, for the measurement.
        """
        self.owners: Mapping[str, int] = {}
        self.costs: Mapping[int, Costs] = {}
        self._model = model
        self._partition = partition
        self._timetable = timetable
        self._devices = devices
        self._optimizer = optimizer
        self._threads = threads
        self._schedule: Schedule
        self._reference: tuple[Traced, Assignment] | None = None
        self._room: Room | None = None
        self._machine: Machine | None = None
        self._measured: tuple[Traced, Plan | None, dict[str, NodeCost]] | None = None

    def place(
        self,
        traced: Traced,
        values: Mapping[str, Any],
        state: Mapping[str, Tensor],
        wanted: Wanted,
        microbatches: int,
        *,
        step: bool = False,
    ) -> Assignment:
        """The stage of every node of a graph.

        Args:
            traced: the graph.
            values: an example of each input, by name.
            state: name in the model → parameter, buffer or constant.
            wanted: the gradients that will be made.
            microbatches: into how many a batch is split.
            step: whether the graph is that of a step, whose memory ``keeps_limits`` judges.

        Raises:
            PartitionError: the model cannot be cut as asked.
        """
        if self._reference is not None:
            return place_like(traced, *self._reference)
        recipe = self._timetable.recipe
        schedule = recipe(len(self._devices), recipe.microbatches or microbatches)
        schedule = self._timetable.recomputing(schedule)
        if self._room is None:
            machine = self._partition.machine(schedule, self._devices)
            self._room = Room(schedule.placement, machine)
        self._machine = machine = self._room.machine()
        nearest = step and self._room.nearest
        if not step:
            self._room.firm = "give compile(..., example=...) of a step, raise memory_limits"
        if self._measured is None or self._measured[0] is not traced:
            with untouched(self._model), intra_op_threads(self._threads), telling("measure"):
                plan = None if traced.leaves else _single(traced, values, state, wanted)
                costs = _costs(traced, plan, values, state)
            self._measured = traced, plan, costs
        _, plan, costs = self._measured
        self._schedule = schedule
        footprint = Footprint()
        if machine.limited:  # else memory decides nothing, and the optimizer need not be asked
            footprint = footprint_of(traced, plan, costs, state, self._copies, self._undo)
        together = self._partition.keep_together
        with telling("partition"):
            if self._partition.at is None:
                assignment = balance(
                    traced,
                    schedule.stages,
                    costs,
                    machine=machine,
                    footprint=footprint,
                    together=together,
                    nearest=nearest,
                )
            else:
                names = self._partition.at
                assignment = cut_at(traced, schedule.stages, names, self._model, together)
                assignment = judge(traced, assignment, costs, machine, footprint, nearest=nearest)
                self._room.firm = "begin stages at other submodules, raise memory_limits"
        self._reference = traced, assignment
        self.owners = owners(traced, assignment)
        self.costs = _by_stage(traced, assignment, costs)
        return assignment

    @property
    def verdict(self) -> Verdict | None:
        """How well the stages are balanced, once there are any."""
        return None if self._reference is None else self._reference[1].verdict

    @property
    def limits(self) -> tuple[float, ...]:
        """Device → the bytes that it may hold; infinite where there is no limit."""
        devices = len(self._devices)
        return self._partition.limits(devices) or (math.inf,) * devices

    @property
    def judged(self) -> bool:
        """Whether the devices keep their limits as predicted, or have none."""
        return self._room is not None and self._room.kept

    def keeps_limits(self, peaks: Sequence[float]) -> bool:
        """Whether the devices keep their limits. If not, a new graph is placed anew.

        Args:
            peaks: device → the most bytes that it is predicted to hold in a step.

        Raises:
            PartitionError: they do not, and no other assignment is to be tried.
        """
        assert self._room is not None and self._machine is not None and self.verdict is not None
        kept = self._room.keeps(self.verdict.loads, self._machine, peaks)
        if not kept:
            self._reference = None
        return kept

    @cached_property
    def _copies(self) -> float:
        """How often a parameter that is trained stands in memory: its versions, its gradient and
        its optimizer state; and, where an update may happen among other tasks, what undoes it."""
        schedule = self._schedule
        copies = max(schedule.delays) + 2 + self._state + schedule.predict
        return copies + self._undoing if schedule.overlaps else copies

    @property
    def _undo(self) -> float:
        """The same of what undoes an update when nothing is saved any more."""
        return 0.0 if self._schedule.overlaps else self._undoing

    @property
    def _undoing(self) -> float:
        return undo_bytes(self._schedule, self._state, 1, 1) if self._optimizer else 0.0

    @cached_property
    def _state(self) -> float:
        return state_size(self._optimizer)


def _single(
    traced: Traced, values: Mapping[str, Any], state: Mapping[str, Tensor], wanted: Wanted
) -> Plan:
    """The whole model as one stage, differentiated."""
    whole = Assignment(1, {node.name: 0 for node in compute_nodes(traced.graph)})
    return part_backward(Differentiate(values, state, wanted)(cut(traced, whole, {})))


def _costs(
    traced: Traced, plan: Plan | None, values: Mapping[str, Any], state: Mapping[str, Tensor]
) -> dict[str, NodeCost]:
    return measure_leaves(traced, values) if plan is None else measure(traced, plan, values, state)


def _by_stage(
    traced: Traced, assignment: Assignment, costs: Mapping[str, NodeCost]
) -> dict[int, Costs]:
    found: list[list[NodeCost]] = [[] for _ in range(assignment.stages)]
    for node in compute_nodes(traced.graph):
        found[assignment.nodes[node.name]].append(costs[node.name])
    return {
        stage: Costs(
            forward=sum(cost.forward for cost in nodes),
            backward=sum(cost.backward for cost in nodes),
            input_grad=sum(cost.input_grad for cost in nodes),
            weight_grad=sum(cost.weight_grad for cost in nodes),
        )
        for stage, nodes in enumerate(found)
    }
