"""Assign the nodes of a model's graphs to stages: for the first graph, which the others follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from fxpipe.compiler import passes
from fxpipe.compiler.options import Options
from fxpipe.compiler.timetable import Timetable
from fxpipe.errors import told
from fxpipe.ir.plan import StageCosts
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import Traced
from fxpipe.log import LOGGER
from fxpipe.parts import Parts
from fxpipe.passes.partition.assignment import Assignment, compute_nodes, first_readers
from fxpipe.passes.partition.atoms import Footprint
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.passes.partition.work import StageDevices, StageLoad
from fxpipe.passes.runner import run_all
from fxpipe.torchtools.state import collect, intra_op_threads, under, untouched

T = TypeVar("T")


class Budget:
    """What a cut may take of the devices' memory: all that it needs. Extensions have budgets with
    limits, which learn from the peaks of earlier cuts.

    Attributes:
        machine: the devices as the stages see them, with the bytes that the next cut leaves free.
        way_out: what the error advises if no other cut may be tried; empty if it may.
        kept: whether a cut is known to keep the limits.
        nearest: whether a cut that exceeds a limit by the partition's count is accepted all the
            same, because its predicted peak may be lower.
    """

    def __init__(self, machine: StageDevices) -> None:
        self.machine = machine
        self.way_out = ""
        self.kept = not machine.limited
        self.nearest = True

    def keeps(self, loads: Sequence[StageLoad], peaks: Sequence[float]) -> bool:
        """Whether a cut for ``machine`` keeps the limits: ``loads`` are what the partition counted
        for each stage, ``peaks`` the predicted peaks of devices. If it does not, ``machine`` leaves
        more free from now on; raises PartitionError if no other cut may be tried."""
        return True


class Placement:
    """Assigns the nodes of each graph of a model to stages.

    The first graph is measured and cut; graphs of other modes and sizes follow it, so that a
    parameter never changes its stage.

    Attributes:
        owners: parameter or buffer, by its name in the model → the first stage that reads it.
        costs: stage → its costs, as measured on the first graph; empty if that was cut by names,
            until somebody asks for them.
        samples: the samples of the micro-batch of these costs.
        timetable: makes the schedule of training steps, which places the stages on devices.
    """

    def __init__(self, options: Options, timetable: Timetable) -> None:
        self.owners: Mapping[str, int] = {}
        self.costs: Mapping[int, StageCosts] = {}
        self.samples = 1
        self._options = options
        self.timetable = timetable
        self._reference: tuple[Traced, Assignment] | None = None
        self._budget: Budget | None = None
        self._measured: Mapping[str, Any] = {}
        self._measured_samples = 1
        self._parted = True  # whether steps may split backwards, so that halves are measured

    def place(
        self, facts: Mapping[str, Any], microbatches: int, samples: int, *, step: bool
    ) -> Assignment:
        """Assign every node of a graph to a stage.

        Args:
            facts: the result of ``Call.as_trained`` for the graph.
            microbatches: the number of micro-batches in a batch.
            samples: the samples of this one.
            step: whether it is the graph of a step, whose memory ``keeps_limits`` checks later.

        Raises:
            PartitionError: the model cannot be cut as asked.
        """
        traced = facts["traced"]
        if self._reference is not None:
            return self.follow(traced, *self._reference)
        options, partition = self._options, self._options.partition
        schedule = self.timetable.for_placing(microbatches)
        if self._budget is None:
            machine = partition.machine(schedule, options.names)
            self._budget = (
                Parts.memory_budget.find("memory_limits=")(schedule, machine)
                if machine.limited
                else Budget(machine)
            )
        machine = self._budget.machine
        self._parted = "I" in schedule.kinds or bool(options.decides)
        nearest = step and self._budget.nearest
        if not step:
            self._budget.way_out = "give compile(..., example=...) of a step, raise memory_limits"
        later = self._can_measure_later(traced, schedule)
        if not later and self._measured.get("traced") is not traced:
            self._measured = (
                self.measure(facts)  # the plan of one stage tells what nodes keep in memory
                if machine.limited
                else {"traced": traced, "costs": self.node_costs(facts)}
            )
            self._measured_samples = samples
        facts = {
            **({"traced": traced} if later else self._measured),
            "state": facts["state"],
            "options": options,
            "schedule": schedule,
            "stages": schedule.stages,
            "machine": machine,
            "limited": machine.limited,
            "footprint": Footprint(),
            "at": partition.at,
            "named": partition.at is not None,
            "judged": partition.at is not None and not later,
            "nearest": nearest,
            "partitioner": next(filter(None, (e.partitioner() for e in options.extensions)), None),
            "model": options.model,
        }
        assignment: Assignment = run_all(passes.of(self._options, "partition"), facts)["assignment"]
        if partition.at is not None:
            self._budget.way_out = "begin stages at other submodules, raise memory_limits"
        self._reference = traced, assignment
        self.owners = first_readers(traced, assignment)
        self.costs = {} if later else self.by_stage(traced, assignment, facts["costs"])
        self.samples = samples if later else self._measured_samples
        return assignment

    def _can_measure_later(self, traced: Traced, schedule: Schedule) -> bool:
        """Whether the costs of stages can be measured when somebody asks for them. The cut must not
        depend on costs, and measuring must be possible between batches: on CPUs, in one process,
        and without calling the user's modules."""
        options = self._options
        elsewhere = options.places or options.hollow or options.group.size > 1
        named = options.partition.at is not None and not options.decides
        limited = self._budget is None or self._budget.machine.limited
        return named and not (elsewhere or limited or traced.calls or schedule.overlaps)

    def follow(self, traced: Traced, reference: Traced, assignment: Assignment) -> Assignment:
        """Assign the nodes of a graph to stages as in a reference graph with its assignment."""
        facts = {"traced": traced, "reference": reference, "assignment": assignment}
        placed: Assignment = run_all(passes.of(self._options, "follow"), facts)["assignment"]
        return placed

    def measure(self, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Measure a graph; returns it as ``traced``, its ``plan`` of one stage, and ``costs``, node
        → its costs. It is measured as for training, whatever the call is for, unless backwards fail
        and the call needs none."""
        with self._measuring():
            facts = _trying_gradients(self._facts(facts), self._single)
            share = self._options.group.share
            costs = share("costs", lambda: _trying_stand_ins(facts, self._timed))
        return {"traced": facts["traced"], "plan": facts["plan"], "costs": costs}

    def node_costs(self, facts: Mapping[str, Any]) -> Mapping[str, NodeCost]:
        """Measure a graph as ``measure`` does; returns node → its costs. Over several ranks, only
        rank 0 differentiates it."""

        def run(facts: Mapping[str, Any]) -> Mapping[str, NodeCost]:
            return _trying_stand_ins(self._single(facts), self._timed)

        facts = self._facts(facts)
        costs: Mapping[str, NodeCost]
        with self._measuring():
            costs = self._options.group.share("costs", lambda: _trying_gradients(facts, run))
        return costs

    def _single(self, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """The facts with a plan of one stage that can be measured."""
        return run_all(passes.of(self._options, "single"), facts)

    def _timed(self, facts: Mapping[str, Any]) -> Mapping[str, NodeCost]:
        """Node → its costs, by the plan of one stage."""
        if self._options.costs is not None:
            return self._options.costs.node_costs(facts["traced"], facts["plan"])
        with under(()):  # as the graphs run
            costs: Mapping[str, NodeCost]
            costs = run_all(passes.of(self._options, "measure"), facts)["costs"]
        return costs

    def by_stage(
        self, traced: Traced, assignment: Assignment, costs: Mapping[str, NodeCost]
    ) -> dict[int, StageCosts]:
        """Stage → the sum of its nodes' costs."""
        halves = self._parted  # else those of halves are not known
        by_stage: list[dict[str, NodeCost]] = [{} for _ in range(assignment.stages)]
        for node in compute_nodes(traced.graph):
            by_stage[assignment.nodes[node.name]][node.name] = costs[node.name]
        return {
            stage: StageCosts(
                forward=sum(cost.forward for cost in nodes.values()),
                backward=sum(cost.backward for cost in nodes.values()),
                input_grad=sum(cost.input_grad for cost in nodes.values()) if halves else None,
                weight_grad=sum(cost.weight_grad for cost in nodes.values()) if halves else None,
                nodes={name: cost.seconds for name, cost in nodes.items()},
            )
            for stage, nodes in enumerate(by_stage)
        }

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        with untouched(self._options.model), intra_op_threads(self._options.threads):
            yield
        collect()

    def _facts(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **facts,
            "plan": None,
            "owners": {},
            "stage_costs": {},
            "whole": self._options.whole and not self._options.apart,
            "functional": self._parted,
            "threads": self._options.threads,
        }

    @property
    def kept(self) -> Sequence[object]:
        """The other objects that change when a graph is placed."""
        return () if self._budget is None else (self._budget,)

    @property
    def loads(self) -> Sequence[StageLoad]:
        """Stage → load, by the costs of the first graph; empty as long as these are not known."""
        return () if self._reference is None else self._reference[1].loads

    @property
    def limits(self) -> tuple[float, ...]:
        """Device → the bytes that it may hold; infinite if there is no limit."""
        devices = len(self._options.devices)
        return self._options.partition.limits(devices) or (math.inf,) * devices

    @property
    def judged(self) -> bool:
        """Whether the devices have no memory limits, or are predicted to keep them."""
        return self._budget is not None and self._budget.kept

    def keeps_limits(self, peaks: Sequence[float]) -> bool:
        """Whether devices with these memory peaks keep their limits. If not, ``place`` cuts the
        next graph anew; raises PartitionError if no other cut may be tried."""
        assert self._budget is not None
        kept = self._budget.keeps(self.loads, peaks)
        if not kept:
            self._reference = None
        return kept

    def forget(self) -> None:
        """Cut the next graph as if it were the first."""
        self._reference = self._budget = None


def _trying_stand_ins(facts: Mapping[str, Any], run: Callable[[Mapping[str, Any]], T]) -> T:
    """What ``run`` makes of the facts where operations get numbers that share memory, so that no
    activations are kept and a device holds the operands of one operation. If one refuses such
    numbers, as a user's own operation may, it is made of the values themselves, unless these may
    not be in memory all at once."""
    try:
        return run({**facts, "share": True})
    except Exception as error:
        if not facts["whole"]:
            raise
        LOGGER.info("stages are measured with the values of a batch: %s", told(error))
    return run({**facts, "share": False})


def _trying_gradients(facts: Mapping[str, Any], run: Callable[[Mapping[str, Any]], T]) -> T:
    """What ``run`` makes of the facts. If backwards fail, as an operation has no derivative or
    memory is short, and the call needs none, it is what ``run`` makes without them."""
    try:
        return run(facts)
    except Exception as error:
        if facts["wanted"] == facts["needed"]:
            raise
        LOGGER.info("stages are measured without gradients: %s", told(error))
    return run({**facts, "wanted": facts["needed"]})
