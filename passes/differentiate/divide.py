"""Divide a captured backward among the stages, and give each stage its kernel.

before:  stage 0: a = f(x, w);  stage 1: b = g(a);  and their backward, gb = dg(…), ga = df(gb)
after:   stage 0: a = f(x, w) and ga = df(gb, …);  stage 1: b = g(a) and gb = dg(…)
         edges    act a 0->1,  grad gb 1->0

A node of the backward belongs to the stage of the node whose gradient it has a part in, but to no
later one than the gradients that it reads. A sum of gradients belongs to the stage where its last
part is made, so that all are added in autograd's own order. What one stage's backward makes and
another's reads goes along an edge of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.errors import TraceError
from fxpipe.ir.called import Called
from fxpipe.ir.plan import Plan, Stage, ValueSpec
from fxpipe.ir.traced import BYTES, ORIGIN, Traced, WholeBackward
from fxpipe.ir.value import HOST, Edge, outputs_of
from fxpipe.kernels.graph import GraphKernel
from fxpipe.passes.differentiate.extract import ancestors, extract, results, with_names
from fxpipe.passes.differentiate.fitted import FITTED
from fxpipe.passes.differentiate.split_joint import split_joint
from fxpipe.passes.graph.copies import node_copied
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.torchtools.pytrees import bytes_of


@dataclass(frozen=True)
class Wanted:
    """The gradients that a step needs.

    Attributes:
        outputs: the returned values whose gradients the caller gives: the loss, or all outputs of a
            differentiable call.
        inputs: whether the gradients of inputs that require them are returned to the caller.
    """

    outputs: frozenset[str] = frozenset()
    inputs: bool = False


def divide(
    plan: Plan,
    traced: Traced,
    state: Mapping[str, Tensor],
    wanted: Wanted,
    functional: bool = True,
) -> Plan:
    """Plan → Plan: give it ``gradients`` and specs, and its stages their kernels.

    Args:
        plan: as it was cut.
        traced: the graph that it was cut from, with its backward.
        state: name in the model → parameter, buffer or constant.
        wanted: the gradients to compute; without any, the kernels are for inference.
        functional: whether kernels keep their functional backward, for passes that split it.

    Raises:
        TraceError: the graph cannot be differentiated, a parameter's gradient is sparse, or it is
            made before the stage that owns it.
    """
    assert traced.backward is not None
    if wanted.outputs and traced.backward.lacks:
        raise TraceError(
            f"the model has no gradients ({traced.backward.lacks}); call it under "
            "torch.no_grad(), or give the operation a derivative"
        )
    return _Division(plan, traced, traced.backward, state, wanted).plan_of(functional)


class _Division:
    def __init__(
        self,
        plan: Plan,
        traced: Traced,
        backward: WholeBackward,
        state: Mapping[str, Tensor],
        wanted: Wanted,
    ) -> None:
        self.plan, self.traced, self.backward = plan, traced, backward
        self.state = state
        self.nodes = {node.name: node for node in traced.graph.nodes}
        self.back = {node.name: node for node in backward.graph.nodes if node.op != "output"}
        self.home = {
            node.name: stage.index
            for stage in plan.stages
            for node in stage.graph.graph.nodes
            if node.op != "output" and node.op != "placeholder"
        }
        self.home |= {a.name: stage.index for stage in plan.stages for a in stage.parameters}
        self.tangents = {given: out for out, given in backward.given.items()}
        inputs = {name for name in traced.inputs if name is not None}
        self.results = {
            source: value
            for source, value in backward.gradients.items()
            if wanted.outputs and (source not in inputs or wanted.inputs)
        }
        needed = ancestors(self.back[value] for value in self.results.values())
        self.stage_of: dict[str, int] = {}
        for node in backward.graph.nodes:
            if node in needed and node.op == "call_function":
                self.stage_of[node.name] = self._place(node)
        self.edges: dict[Edge, None] = {}  # what goes from backward to backward
        self.extra: dict[Edge, None] = {}  # what backwards read of other stages' forwards
        self._connect(inputs)

    def _place(self, node: fx.Node) -> int:
        reads = [self.stage_of[n.name] for n in node.all_input_nodes if n.name in self.stage_of]
        origin = self.home.get(node.meta.get(ORIGIN) or "")
        if origin is not None:
            reads.append(origin)
        if reads:
            return min(reads)
        of = [self.home[n.name] for n in node.all_input_nodes if n.name in self.home]
        return max(of, default=len(self.plan.stages) - 1)

    def _connect(self, inputs: set[str]) -> None:
        """Find what crosses from backward to backward, and what backwards read of other stages'
        forwards."""
        arriving = {(edge.value, edge.target) for edge in self.plan.edges}
        for name, stage in self.stage_of.items():
            for source in self.back[name].all_input_nodes:
                self._carry(source.name, stage, arriving)
        for source, value in self.results.items():
            if source in inputs:
                made = self._maker(value)
                self.edges[Edge(made, HOST, source, gradient=True)] = None
                self._carry(value, made, arriving)
            else:
                self._carry(value, self.home[source], arriving)

    def _maker(self, value: str) -> int:
        """The stage in whose backward a value is first there."""
        if value in self.stage_of:
            return self.stage_of[value]
        return self.home.get(value, len(self.plan.stages) - 1)

    def _carry(self, value: str, stage: int, arriving: set[tuple[str, int]]) -> None:
        """Bring a value to a stage's backward."""
        if value in self.tangents:
            self.edges[Edge(HOST, stage, self.tangents[value], gradient=True)] = None
        elif value in self.stage_of:
            made = self.stage_of[value]
            if made < stage:
                raise TraceError(
                    f"a gradient that stage {stage} needs ({value}) is made by stage {made}, "
                    "whose backward comes later; put both into one stage"
                )
            if made > stage:
                self.edges[Edge(made, stage, value, gradient=True)] = None
        elif value in self.home and self.home[value] > stage:
            self.edges[Edge(self.home[value], stage, value, gradient=True)] = None
        elif self.home.get(value) != stage and (value, stage) not in arriving:
            holder = self.nodes[value]
            if any(a.name == value for a in self.traced.buffers):
                return  # every stage reads it in place
            source = self.home.get(value, HOST)
            self.extra[Edge(source, stage, holder.name)] = None

    def plan_of(self, functional: bool) -> Plan:
        order = {name: place for place, name in enumerate((*self.nodes, *self.back))}
        edges = sorted(self.extra, key=lambda e: (order[e.value], e.target))
        plan = replace(
            self.plan,
            edges=(*self.plan.edges, *edges),
            gradients=tuple(sorted(self.edges, key=lambda e: (order[e.value], e.target))),
        )
        stages = [self._completed(stage, plan) for stage in plan.stages]
        plan = replace(plan, stages=tuple(stages), specs=self._specs(plan))
        kernels = [self._kernel(stage, plan, functional) for stage in stages]
        made = tuple(replace(s, kernel=k) for s, k in zip(stages, kernels, strict=True))
        return self._named(replace(plan, stages=made))

    def _named(self, plan: Plan) -> Plan:
        """The plan with a name for each value that one backward makes and another reads: that of a
        value of the forward, as the nodes of backwards may have other names for other sizes."""
        taken, names = {*self.nodes, *self.back}, dict[str, str]()
        for value in dict.fromkeys(edge.value for edge in plan.gradients):
            if value in self.stage_of:
                stem = name = f"{self._of(self.back[value])}_grad"
                count = 1
                while name in taken:
                    count += 1
                    name = f"{stem}_{count}"
                taken.add(name)
                names[value] = name
        return replace(
            plan,
            gradients=tuple(
                replace(edge, value=names.get(edge.value, edge.value)) for edge in plan.gradients
            ),
            specs={names.get(value, value): spec for value, spec in plan.specs.items()},
        )

    def _of(self, node: fx.Node) -> str:
        """The parameter whose gradient a node of the backward is or has a part in, or else the
        operation of another stage that goes on with it."""
        of = {value: source for source, value in self.results.items()}
        sums = [node]
        for each in sums:  # of the parts of a gradient
            if each.name in of:
                return of[each.name]
            sums += [user for user in each.users if user.meta.get(ORIGIN) is None]
        here = self.stage_of[node.name]
        readers = [user for user in node.users if self.stage_of.get(user.name, here) != here]
        origins = [user.meta.get(ORIGIN) for user in (*readers, *node.users, node)]
        return next((name for name in origins if name is not None), "value")

    def _completed(self, stage: Stage, plan: Plan) -> Stage:
        """The stage with placeholders for what only its backward reads, and results for what only
        other stages' backwards read."""
        into = [edge.value for edge in plan.edges_into(stage.index)]
        away = outputs_of(plan.edges_from(stage.index))
        old = {node.name: node for node in stage.graph.graph.nodes if node.op != "output"}
        held = [a.name for a in (*stage.parameters, *stage.buffers) if a.name in old]
        read = {
            source.name
            for name, there in self.stage_of.items()
            if there == stage.index
            for source in self.back[name].all_input_nodes
        }
        more = [a for a in self.traced.buffers if a.name in read and a.name not in held]
        names = (*held, *(a.name for a in more), *into)
        given = [old.get(name) or self.nodes[name] for name in names]
        nodes = [node for node in old.values() if node.op != "placeholder"]
        named = {node.name: node for node in (*given, *nodes)}
        returned = results(stage.graph.graph)
        writes = returned[len(returned) - len(stage.writes) :]
        ends = [*(named[name] for name in away), *writes]
        graph = with_names(extract(given, nodes, ends), given)
        for node in graph.nodes:
            node.meta[BYTES] = bytes_of(node.meta.get("val"))
            if node.op not in ("placeholder", "output"):
                node.meta["custom"] = {**node.meta.get("custom", {}), ORIGIN: node.name}
        return replace(
            stage,
            graph=lazy_module(self.traced.module, graph, f"Stage{stage.index}"),
            buffers=(*stage.buffers, *more),
        )

    def _specs(self, plan: Plan) -> dict[str, ValueSpec]:
        values: dict[str, Any] = {}
        for edge in (*plan.edges, *plan.gradients):
            node = self.nodes.get(edge.value) or self.back[edge.value]
            values[edge.value] = node.meta.get("val")
        return {
            name: ValueSpec(tuple(x.shape), x.dtype, x.stride(), x.device.type)
            for name, x in values.items()
            if isinstance(x, Tensor)
        }

    def _kernel(self, stage: Stage, plan: Plan, functional: bool) -> GraphKernel:
        graph, here = fx.Graph(), stage.index
        into, away = plan.edges_into(here), outputs_of(plan.edges_from(here))
        given = outputs_of(plan.gradients_into(here))
        returned = outputs_of(plan.gradients_from(here))
        by_name: dict[str, fx.Node] = {}
        for node in stage.graph.graph.nodes:
            if node.op != "output":
                by_name[node.name] = _copied(node, graph, by_name)
        end = results(stage.graph.graph)
        late = dict(by_name)
        for value in given:
            copy = graph.placeholder(f"gradient_{value}")
            name = self.backward.given.get(value, value)
            source = self.back.get(name) or self.nodes[name]
            copy.meta.update(source.meta)
            late[name] = copy
        gradients = graph.find_nodes(op="placeholder")[-len(given) :] if given else []
        for node in self.backward.graph.nodes:
            if self.stage_of.get(node.name) == here:
                late[node.name] = _copied(node, graph, late)
        of_inputs = [self.results.get(name, name) for name in returned]
        trained = {a.name: self.results[a.name] for a in stage.parameters if a.name in self.results}
        computed = [*of_inputs, *trained.values()]
        writes = [by_name[node.name] for node in end[len(end) - len(stage.writes) :]]
        added = {late[n] for n in trained.values()} - {late[n] for n in of_inputs}
        graph.output((*(by_name[n] for n in away), *writes, *(late[n] for n in computed)))
        for node in graph.nodes:
            node.target = FITTED.get(node.target, node.target)
            if isinstance(node.target, Called) and not self.results:
                node.target = node.target.without_backward()
            elif isinstance(node.target, Called):
                parts = [user for user in node.users if user in added and len(user.users) == 1]
                node.target = node.target.adding([int(str(part.args[1])) for part in parts])
        names = [n.name for n in stage.graph.graph.nodes if n.op == "placeholder"]
        for argument in stage.parameters:
            example = late[trained[argument.name]].meta["val"] if argument.name in trained else None
            if example is not None and example.layout is not torch.strided:
                raise TraceError(
                    f"the gradient of {argument.target!r} is {example.layout}, which cannot be "
                    "added up over micro-batches; make it dense, as with "
                    "nn.Embedding(..., sparse=False)"
                )
        parameters = [self.state[a.target] for a in stage.parameters if a.name in trained]
        return GraphKernel(
            *split_joint(
                graph,
                here,
                [*names, *(node.name for node in gradients)],
                len(names),
                len(away) + len(stage.writes),
                parameters,
                functional,
            ),
            outputs=len(away),
            writes=len(stage.writes),
            input_strides=tuple(_strides(self.nodes[edge.value].meta.get("val")) for edge in into),
            gradient_strides=tuple(node.meta["val"].stride() for node in gradients),
            input_gradients=len(returned),
            parameter_gradients=tuple(a.name in trained for a in stage.parameters),
        )


def _copied(node: fx.Node, graph: fx.Graph, copies: Mapping[str, fx.Node]) -> fx.Node:
    copy = node_copied(graph, node, lambda n: copies[n.name])
    if node.op == "placeholder":
        copy.target = node.name
    if (origin := node.meta.get(ORIGIN)) is not None:
        copy.meta["custom"] = {**node.meta.get("custom", {}), ORIGIN: origin}
    return copy


def _strides(value: Any) -> tuple[int, ...] | None:
    return value.stride() if isinstance(value, Tensor) else None
