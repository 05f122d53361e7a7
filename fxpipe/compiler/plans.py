"""Make the plan of a call: trace, place, cut, differentiate and check, and keep each result."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.compiler import passes
from fxpipe.compiler.front_end import Call, FrontEnd
from fxpipe.compiler.model_check.checking import Checking
from fxpipe.compiler.options import Options
from fxpipe.compiler.placement import Placement
from fxpipe.compiler.residence import gathered, settle
from fxpipe.errors import told
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced, with_dims
from fxpipe.log import LOGGER
from fxpipe.passes.partition.assignment import Assignment
from fxpipe.passes.runner import run_all
from fxpipe.passes.tracing.shapes import Shapes
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

    As long as all micro-batches of a kind of call have the same shapes, its graph is captured for
    these only, which takes a third of the time. For other shapes it is captured for any size of the
    batch and of the dimensions that have changed, and the sizes of a call are put in. If the model
    does not hold for any, each size of these dimensions has its own graph.

    Attributes:
        front_end: traces the model.
        graphs: the graphs that plans were made from.
        placement: assigns the nodes of graphs to stages.
        made: how many graphs were traced or differentiated.
        proven: whether some graph of the model was found to be right, here or before a checkpoint
            that was loaded. From then on, what may yet be rounding is a warning, not an error.
    """

    def __init__(self, options: Options, placement: Placement) -> None:
        self.options = options
        self.front_end = FrontEnd(options)
        self.graphs: dict[Any, Graph] = {}
        self.made = 0
        self.proven = False
        self._compare = Checking(self)
        self.placement = placement
        # kind of call → the first shapes, which have a graph of their own; None if they do not
        self._first: dict[Any, Shapes | None] = {}
        # kind of call → its dimensions whose sizes are no symbols in a graph that was to have them
        self._rigid: dict[Any, frozenset[tuple[int, int]]] = {}
        self._dims: dict[Any, Sequence[tuple[int, ...]] | None] = {}
        self._plans: dict[Any, Plan] = {}
        self._placed_plans: dict[Any, tuple[Traced, Plan]] = {}
        self._checked: set[tuple[int, bool, bool]] = set()
        self._traced: dict[Any, Traced] = {}
        self._counted: set[Any] = set()
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
        key = *self._plan_key(call), placement
        if key not in self._placed_plans:
            with self.gathered(call) as here:
                traced, plan = self._plan(here)
                if not options.apart:
                    plan = self._compiled(plan)
                self._check(here, traced, plan)
            if options.places:
                stage_devices = tuple(options.places[device] for device in placement)
                facts = {"plan": plan, "device": options.here, "stage_devices": stage_devices}
                plan = self._compiled(run_all(passes.of(self.options, "devices"), facts)["plan"])
            key = *self._plan_key(call), placement  # as tracing may change it
            self._placed_plans[key] = traced, plan
        traced, plan = self._placed_plans[key]
        settle(options, traced, plan, call.schedule)
        return traced, plan

    def forget(self) -> None:
        """Forget all plans, so that graphs are placed and differentiated anew; keep the traces."""
        for results in (
            self.graphs,
            self._plans,
            self._placed_plans,
            self._checked,
        ):
            results.clear()

    def keep(self, plans: Collection[tuple[Traced, Plan]]) -> None:
        """Forget what none of these graphs and plans was made of."""
        kept, traced = {id(plan) for _, plan in plans}, {id(graph) for graph, _ in plans}
        kept_graphs = [graph for graph, _ in plans]
        self._placed_plans = {k: v for k, v in self._placed_plans.items() if id(v[1]) in kept}
        of = {key[:-1] for key in self._placed_plans}
        self._plans = {k: plan for k, plan in self._plans.items() if k in of}
        self.graphs = {k: graph for k, graph in self.graphs.items() if id(graph.traced) in traced}
        wholes = traced | {id(graph.of) for graph in kept_graphs}
        self._checked = {each for each in self._checked if each[0] in wholes}
        self._traced = {
            (key, shapes): made
            for (key, shapes), made in self._traced.items()
            if any(key == other and made.accepts(given) for other, given in self.graphs)
        }
        self._dims = {k: v for k, v in self._dims.items() if k in self.graphs}
        kinds = {key[:-1] for key, _ in self.graphs}
        self._first = {k: v for k, v in self._first.items() if k[0] in kinds}
        self._rigid = {k: v for k, v in self._rigid.items() if k in kinds}

    def share_traces(self, other: Plans) -> None:
        """Use the traces of another compiler of the same model and loss, and leave it new ones."""
        self.front_end, self.proven = other.front_end, other.proven
        self._traced, self._dims, self._rigid = other._traced, other._dims, other._rigid

    def measure(self) -> None:
        """Measure the costs of stages if that was put off, with zeros, as the data of the call is
        gone. If operations refuse them, nothing is measured, which the log says."""
        if self.placement.costs or not self.graphs:
            return
        graph = next(iter(self.graphs.values()))
        # whatever modes the caller is in
        with torch.inference_mode(False), torch.enable_grad(), under(()):
            try:
                facts = graph.call.zeros().as_trained(graph.traced, self.options.model)
                self.placement.costs = self.placement.costs_of(facts, graph.assignment)
            except Exception as error:
                LOGGER.info("the stages are not measured: %s", told(error))

    def output_dims(self, call: Call, traced: Traced) -> Traced:
        """The call's graph, completed by the batch dimensions of its outputs."""
        if all(out.dims is not None for out in traced.outputs):
            return traced
        key = self._graph_key(call), call.shapes
        if key not in self._dims:
            with self.gathered(call) as here:
                self._dims[key] = self.front_end.output_dims(traced, here)
        dims = self._dims[key]
        return traced if dims is None else with_dims(traced, dims)

    def gathered(self, call: Call) -> AbstractContextManager[Call]:
        """See ``residence.gathered``."""
        return gathered(self.options, call, [graph.traced for graph in self.graphs.values()])

    def _plan(self, call: Call) -> tuple[Traced, Plan]:
        graph = self._graph(call)
        key = self._plan_key(call)
        if key not in self._plans:
            self._plans[key] = self.differentiated(graph.traced, graph.assignment, call)
        return graph.traced, self._plans[key]

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
        key = (id(traced.of or traced), call.purpose != "infer", call.parted)
        if key in self._checked:
            return
        if self._compare(call, traced, plan):
            self.proven = True
            self.front_end.guard.settle()  # attributes that this run has set are no change
        self._checked.add(key)

    def _graph(self, call: Call) -> Graph:
        key = self._graph_key(call)
        shapes = call.shapes
        kept = self.graphs.get((key, shapes)) or next(
            (g for k, g in self.graphs.items() if k[0] == key and g.traced.accepts(shapes)), None
        )
        if kept is not None:
            return kept
        traced = self.trace(call)
        facts = call.as_trained(traced, self.options.model)
        assignment = self.placement.place(
            facts, call.schedule.microbatches, call.size, step=call.purpose == "step"
        )
        key = *self._kind(call), key[-1]  # tracing may have found what that depends on
        graph = self.graphs[key, shapes] = Graph(traced, assignment, call.without_data())
        self._first.setdefault(self._class(call), key[-1])
        return graph

    def trace(self, call: Call) -> Traced:
        """The graph of a call, which may be that of an earlier one."""
        key = self._graph_key(call)
        shapes = call.shapes
        kept = (t for k, t in self._traced.items() if k[0] == key and t.accepts(shapes))
        traced = next(kept, None)
        if traced is None:
            traced = self._new_trace(call) if key[-1] is None else self.front_end.trace(call)
            self.front_end.guard.settle()
            self._count("a graph", traced)
            self._traced[(*self._kind(call), key[-1]), shapes] = traced
        return traced

    def _count(self, what: Any, traced: Traced) -> None:
        """Count what was made of a graph, but not again for sizes that were put into it."""
        if traced.of is None:
            self.made += 1
        elif (what, id(traced.of)) not in self._counted:
            self._counted.add((what, id(traced.of)))
            self.made += 1

    def _new_trace(self, call: Call) -> Traced:
        """Trace for any size of the batch, and of the dimensions that have had other sizes."""
        kind, shapes = self._kind(call), call.shapes
        rigid = self._rigid.get(kind, frozenset())
        changed: dict[tuple[int, int], int] = {}  # dimension → another size
        for known in [shape for key, shape in self._traced if key[:-1] == kind]:
            changed |= {
                (leaf, dim): other
                for leaf, (now, then) in enumerate(zip(shapes, known, strict=True))
                for dim, (size, other) in enumerate(zip(now or (), then or (), strict=True))
                if size != other and dim != call.batch.dims[leaf] and (leaf, dim) not in rigid
            }
        free = [
            tuple(
                dim
                for dim, size in enumerate(shape or ())
                if size > 1 and ((leaf, dim) in changed or dim == call.batch.dims[leaf])
            )
            for leaf, shape in enumerate(shapes)
        ]
        traced = self.front_end.trace(call, free=free)
        others = [
            shape and tuple(changed.get((leaf, dim), size) for dim, size in enumerate(shape))
            for leaf, shape in enumerate(shapes)
        ]
        if not (traced.of or traced).accepts(others):
            self._rigid[kind] = rigid | changed.keys()
        return traced

    def first_shapes(self, call: Call) -> Shapes | None:
        """The shapes of the first graph for calls like this one, if that holds for these only, and
        there is no graph for other shapes yet."""
        key = self._graph_key(call)[:-1]
        whole = any(known[:-1] == key and known[-1] is None for known, _ in self._traced)
        return None if whole else self._first.get(self._class(call))

    def _plan_key(self, call: Call) -> tuple[Any, ...]:
        return self._graph_key(call), call.shapes, call.purpose, call.wants, call.parted

    def _graph_key(self, call: Call) -> tuple[Any, ...]:
        """Everything that a trace depends on. The shapes come last, or None if others fit, too."""
        fixed = call.fixed
        if fixed is None:
            kind, known, shapes = self._kind(call), self._class(call), call.shapes
            alone = call.uniform
            fixed = alone and self._first.get(known, shapes) == shapes
            if fixed and known not in self._first:
                free = (t for k, t in self._traced.items() if k[0] == (*kind, None))
                fixed = not any(traced.accepts(shapes) for traced in free)
        return *self._kind(call), call.shapes if fixed else None

    def _kind(self, call: Call) -> tuple[Any, ...]:
        """Everything that a trace depends on but sizes."""
        return self.front_end.kind(call, self._state)

    def _class(self, call: Call) -> tuple[Any, ...]:
        """The kind of a call, with its sizes of which each needs a graph."""
        kind, shapes = self._kind(call), call.shapes
        rigid = sorted(self._rigid.get(kind, ()))
        return kind, *((shapes[leaf] or ())[dim] for leaf, dim in rigid)
