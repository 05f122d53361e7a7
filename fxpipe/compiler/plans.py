"""Make the plan of a call: trace, place, cut, differentiate and check, and keep each result."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.compiler import passes
from fxpipe.compiler.front_end import Call, FrontEnd
from fxpipe.compiler.memo import Memo
from fxpipe.compiler.model_check.checking import Checking
from fxpipe.compiler.options import Options
from fxpipe.compiler.placement import Placement
from fxpipe.compiler.residence import gathered, settle
from fxpipe.compiler.sizes import GraphSizes
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced, with_dims
from fxpipe.log import LOGGER
from fxpipe.passes.partition.assignment import Assignment
from fxpipe.passes.runner import run_all
from fxpipe.torchtools.state import intra_op_threads, under, untouched


@dataclass(frozen=True)
class Graph:
    """A traced graph with the stages of its nodes, and the call that it was traced for, without
    data."""

    traced: Traced
    assignment: Assignment
    call: Call


class Plans:
    """The plans of a model: one for each kind of call and size of micro-batch.

    Attributes:
        front_end: traces the model.
        memo: keeps what is made.
        placement: assigns the nodes of graphs to stages.
        sizes: decides for which sizes graphs are captured.
        made: how many graphs were traced or differentiated.
        proven: whether some graph of the model was found to be right, here or before a checkpoint
            that was loaded. From then on, what may yet be rounding is a warning, not an error.
    """

    def __init__(self, options: Options, placement: Placement, memo: Memo) -> None:
        self.options, self.placement, self.memo = options, placement, memo
        self.front_end = FrontEnd(options, memo)
        self.sizes = GraphSizes(self._kind, memo)
        self.made = 0
        self.proven = False
        self._compare = Checking(self)
        self._state: tuple[Any, ...] = ()

    def look(self) -> None:
        """Look at the state that traces depend on besides the call; call it before ``plan``."""
        self._state = self.front_end.guard.state()

    def plan(self, call: Call) -> tuple[Traced, Plan]:
        """Make the graph of the model and its plan, whose stages are on their devices.

        Raises:
            TraceError: the model cannot be traced, or its trace computes something else.
            PartitionError: the graph cannot be cut as asked.
        """
        options, placement = self.options, call.schedule.placement
        traced, plan = self.memo(
            "placed plan",
            lambda: (*self._key(call), placement),
            lambda: self._placed(call, placement),
        )
        settle(options, traced, plan, call.schedule)
        return traced, plan

    def _placed(self, call: Call, placement: Sequence[int]) -> tuple[Traced, Plan]:
        options = self.options
        with self.gathered(call) as here:
            traced, plan = self._plan(here)
            if not options.apart:
                plan = self._compiled(plan)
            self._check(here, traced, plan)
        if options.places:
            stage_devices = tuple(options.places[device] for device in placement)
            facts = {"plan": plan, "device": options.here, "stage_devices": stage_devices}
            plan = self._compiled(run_all(passes.of(self.options, "devices"), facts)["plan"])
        return traced, plan

    def forget(self) -> None:
        """Forget all plans, so that graphs are placed and differentiated anew; keep the traces."""
        self.memo.forget("graph", "plan", "placed plan", "check")

    def output_dims(self, call: Call, traced: Traced) -> Traced:
        """The call's graph, completed by the batch dimensions of its outputs."""
        if all(out.dims is not None for out in traced.outputs):
            return traced

        def made() -> Sequence[tuple[int, ...]] | None:
            with self.gathered(call) as here:
                return self.front_end.output_dims(traced, here)

        dims = self.memo("output dims", lambda: (self._graph_key(call), call.shapes), made)
        return traced if dims is None else with_dims(traced, dims)

    def gathered(self, call: Call) -> AbstractContextManager[Call]:
        """See ``residence.gathered``."""
        return gathered(self.options, call, [g.traced for g in self.memo.values("graph")])

    def _plan(self, call: Call) -> tuple[Traced, Plan]:
        graph = self._graph(call)
        plan = self.memo(
            "plan",
            lambda: self._key(call),
            lambda: self.differentiated(graph.traced, graph.assignment, call),
        )
        return graph.traced, plan

    def differentiated(self, traced: Traced, assignment: Assignment, call: Call) -> Plan:
        """The plan of a graph, with its kernels."""
        options = self.options
        replicated = options.replicas > 1 and call.purpose != "infer"
        facts = {
            **call.facts(traced, options.model),
            "assignment": assignment,
            "owners": self.placement.owners,
            "stage_costs": self.placement.costs,
            "parted": call.parted,
            "functional": call.parted or replicated,
            "replicated": replicated,
            "bucket_bytes": options.bucket_bytes,
        }
        self._count((call.purpose, call.wants, call.parted), traced)
        with untouched(options.model), intra_op_threads(options.threads):
            plan: Plan = run_all(passes.of(self.options, "plan"), facts)["plan"]
        return plan

    def _compiled(self, plan: Plan) -> Plan:
        """The same plan with compiled graphs, if an extension compiles them."""
        options = self.options
        given = passes.of(options, "compile")
        if not given:
            return plan
        facts = {
            "plan": plan,
            "threads": options.threads,
            "own": [stage.index for stage in plan.stages if options.runs(stage.index)],
        }
        with torch.no_grad(), intra_op_threads(options.threads), under(()):
            compiled: Plan = run_all(given, facts)["plan"]
        return compiled

    def _check(self, call: Call, traced: Traced, plan: Plan) -> None:
        """Compare a plan with the model, if no plan like it was compared."""
        if self.options.costs is not None:
            LOGGER.info(
                "costs are given: nothing of the model is run, timed or compared with its plan"
            )
            return
        of = traced.of or traced

        def compared() -> Traced:
            if self._compare(call, traced, plan):
                self.proven = True
                self.front_end.guard.settle()  # attributes that this run has set are no change
            return of  # kept, so that no other graph has its id

        self.memo("check", lambda: (id(of), call.purpose != "infer", call.parted), compared)

    def _graph(self, call: Call) -> Graph:
        only = self.sizes.only(call)

        def placed() -> Graph:
            traced = self.trace(call)
            facts = call.as_trained(traced, self.options.model)
            assignment = self.placement.place(
                facts, call.schedule.microbatches, call.size, step=call.purpose == "step"
            )
            self.sizes.placed(call, only)
            return Graph(traced, assignment, call.without_data())

        return self.memo(
            "graph",
            lambda: (*self._kind(call), only),
            placed,
            lambda graph: graph.traced.accepts(call.shapes),
        )

    def trace(self, call: Call) -> Traced:
        """The graph of a call, which may be that of an earlier one."""
        only = self.sizes.only(call)

        def captured() -> Traced:
            free, others = self.sizes.free(call) if only is None else ((), None)
            traced = self.front_end.trace(call, free=free)
            self.front_end.guard.settle()
            self.sizes.captured(call, traced, others)
            self._count("a graph", traced)
            return traced

        return self.memo(
            "trace",
            lambda: (*self._kind(call), only),
            captured,
            lambda traced: traced.accepts(call.shapes),
        )

    def _count(self, what: Any, traced: Traced) -> None:
        """Count what was made of a graph, but not again for sizes that were put into it."""
        of = traced.of or traced

        def counted() -> Traced:
            self.made += 1
            return of  # kept, so that no other graph has its id

        self.memo("count", lambda: (what, id(of)), counted)

    def _graph_key(self, call: Call) -> tuple[Any, ...]:
        """Everything that a trace depends on. The shapes come last, or None if others fit, too."""
        return *self._kind(call), self.sizes.only(call)

    def _key(self, call: Call) -> tuple[Any, ...]:
        """Everything that a plan depends on."""
        return self._graph_key(call), call.shapes, call.purpose, call.wants, call.parted

    def _kind(self, call: Call) -> tuple[Any, ...]:
        """Everything that a trace depends on but sizes."""
        return self.front_end.kind(call, self._state)
