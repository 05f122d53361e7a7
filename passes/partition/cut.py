"""Cut a graph into stages: the assignment becomes a Plan.

before:  x → a (stage 0) → b (stage 1) → c (stage 2), and a → c
after:   stage 0: a = …;   return (a,)           edges  act a 0->1
         stage 1: b = …;   return (b,)                  skip a 0->2
         stage 2: c = f(b, a);   return (c,)            act b 1->2
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from fxpipe.ir.plan import Plan, Stage, StageCosts, Write
from fxpipe.ir.traced import Traced, Value
from fxpipe.ir.value import HOST, Edge, outputs_of
from fxpipe.passes.differentiate.extract import extract, with_names
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.passes.partition.assignment import Assignment, compute_nodes, readers
from fxpipe.torchtools.source import module_paths


def cut(
    traced: Traced,
    assignment: Assignment,
    owners: Mapping[str, int],
    stage_costs: Mapping[int, StageCosts] | None = None,
) -> Plan:
    """Cut a graph into a plan, by an assignment of its nodes to stages.

    Every edge runs forward. ``owners`` has the stage that owns each parameter, by the parameter's
    name in the model. The owner sends it to the other stages that read it, like any value: so there
    is one copy, and the owner's backward adds up its gradients.
    """
    return _Cutter(traced, assignment, owners, stage_costs or {}).plan()


class _Cutter:
    def __init__(
        self,
        traced: Traced,
        assignment: Assignment,
        owners: Mapping[str, int],
        costs: Mapping[int, StageCosts],
    ) -> None:
        self.costs = costs
        self.traced = traced
        self.stages = assignment.stages
        self.stage_of = assignment.nodes
        self.parameters = {a.name: a for a in traced.parameters}
        self.buffers = {a.name: a for a in traced.buffers}
        self.readers = readers(traced)
        self.home = {
            a.name: min(owners.get(a.target, self.stages), self._first_reader(a.target))
            for a in traced.parameters
        }
        self.outputs = {out.name for out in traced.outputs if isinstance(out, Value)}
        if traced.loss is not None:
            self.outputs.add(traced.loss)
        self.outputs.update(traced.logged.values())
        self.edges = self._edges()

    def plan(self) -> Plan:
        return Plan(tuple(map(self._stage, range(self.stages))), self.edges)

    def _first_reader(self, target: str) -> int:
        return min(self._reading_stages(target), default=0)

    def _reading_stages(self, target: str) -> set[int]:
        users = self.readers.get(target, [])
        return {self.stage_of[u.name] for u in users if u.name in self.stage_of}

    def _source(self, node: fx.Node) -> int | None:
        """The stage that makes a value; HOST for an input, None for a buffer, which every stage
        reads in place."""
        if node.op != "placeholder":
            return self.stage_of[node.name]
        if node.name in self.parameters:
            return self.home[node.name]
        return None if node.name in self.buffers else HOST

    def _edges(self) -> tuple[Edge, ...]:
        edges: list[Edge] = []
        for node in self.traced.graph.nodes:
            if node.op == "output":
                continue
            source = self._source(node)
            if source is None:
                continue
            targets = {self.stage_of[u.name] for u in node.users if u.name in self.stage_of}
            edges += [Edge(source, target, node.name) for target in sorted(targets - {source})]
            if node.name in self.outputs and source != HOST:
                edges.append(Edge(source, HOST, node.name))
        return tuple(edges)

    def _stage(self, index: int) -> Stage:
        into = [edge.value for edge in self.edges if edge.target == index]
        away = outputs_of(tuple(edge for edge in self.edges if edge.source == index))
        parameters = [a for a in self.traced.parameters if self.home[a.name] == index]
        buffers = [a for a in self.traced.buffers if index in self._reading_stages(a.target)]
        writes = tuple(write for write in self.traced.writes if self._writer(write) == index)
        by_name = {node.name: node for node in self.traced.graph.nodes}
        given = [by_name[name] for name in (*(a.name for a in (*parameters, *buffers)), *into)]
        nodes = [n for n in compute_nodes(self.traced.graph) if self.stage_of[n.name] == index]
        returned = [*away, *(write.value for write in writes if write.value in by_name)]
        graph = with_names(extract(given, nodes, [by_name[name] for name in returned]), given)
        return Stage(
            index=index,
            parameters=tuple(parameters),
            buffers=tuple(buffers),
            writes=writes,
            graph=lazy_module(self.traced.module, graph, f"Stage{index}"),
            modules=whole_modules(self.traced.graph, self.stage_of, index),
            costs=self.costs.get(index),
        )

    def _writer(self, write: Write) -> int:
        """The stage that writes a buffer; the one that reads it if the new value is an input."""
        return self.stage_of.get(write.value, self._first_reader(write.target))


def whole_modules(graph: fx.Graph, stage_of: Mapping[str, int], stage: int) -> tuple[str, ...]:
    """The outermost submodules all of whose nodes are in a stage; ``stage_of``: node → stage."""
    inside: dict[str, None] = {}
    outside: set[str] = set()
    for node in compute_nodes(graph):
        if stage_of[node.name] == stage:
            inside.update(dict.fromkeys(module_paths(node)))
        else:
            outside.update(module_paths(node))
    whole = [path for path in inside if path not in outside]
    return tuple(
        path
        for path in whole
        if not any(path.startswith(other + ".") for other in whole if other != path)
    )
