"""Give every stage its own sizes, so that no integer has to travel.

before:  stage 0: n = sym_size(x, 0), h = …        stage 1: view(h, [n, 8])   (n crosses)
after:   stage 0: n = sym_size(x, 0), h = …        stage 1: n_1 = sym_size(h, 0), view(h, [n_1, 8])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpipe.passes.partition import Assignment, compute_nodes
from fxpipe.traced import Traced


def localise_sizes(traced: Traced, assignment: Assignment) -> tuple[Traced, Assignment]:
    """Recompute each size that a later stage reads from a tensor which that stage has anyway.

    A size that no tensor of the stage shows stays an edge, as any value would.
    """
    if not any(_is_size(node) for node in traced.graph.nodes):
        return traced, assignment
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(traced.graph, copies)
    returned = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    graph.output(fx.map_arg(returned, lambda node: copies[node]))
    stages = {copies[n].name: assignment.nodes[n.name] for n in compute_nodes(traced.graph)}
    for stage in range(assignment.stages):
        _Localiser(graph, stages, stage).run()
    graph.lint()
    module = fx.GraphModule(traced.module, graph)
    names = {old.name: new.name for old, new in copies.items()}
    assert all(old == new for old, new in names.items()), "copying a graph keeps its names"
    return replace(traced, module=module), Assignment(assignment.stages, stages)


class _Localiser:
    def __init__(self, graph: fx.Graph, stages: dict[str, int], stage: int) -> None:
        self.graph = graph
        self.stages = stages
        self.stage = stage
        self.nodes = [n for n in compute_nodes(graph) if stages.get(n.name) == stage]
        self.made: dict[fx.Node, fx.Node] = {}
        self.sources = self._sources()

    def run(self) -> None:
        if not self.nodes:
            return
        for node in self.nodes:
            for size in node.all_input_nodes:
                if _is_size(size) and self.stages.get(size.name, self.stage) != self.stage:
                    local = self._local(size)
                    if local is not None:
                        node.replace_input_with(size, local)

    def _sources(self) -> Mapping[str, tuple[fx.Node, int]]:
        """Size, as an expression → a tensor that arrives at the stage and its dimension."""
        found: dict[str, tuple[fx.Node, int]] = {}
        for node in self.nodes:
            for tensor in node.all_input_nodes:
                value = tensor.meta.get("val")
                inside = self.stages.get(tensor.name) == self.stage
                if inside or not isinstance(value, torch.Tensor):
                    continue
                for dimension, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt):
                        found.setdefault(str(size), (tensor, dimension))
        return found

    def _local(self, size: fx.Node) -> fx.Node | None:
        """The size computed anew inside the stage, before its first node; None if it cannot be."""
        if size in self.made:
            return self.made[size]
        first = self.nodes[0]
        source = self.sources.get(str(size.meta["val"]))
        if source is not None:
            tensor, dimension = source
            with self.graph.inserting_before(first):
                local = self.graph.call_function(torch.ops.aten.sym_size.int, (tensor, dimension))
        else:
            inputs = {node: self._local(node) for node in size.all_input_nodes if _is_size(node)}
            if len(inputs) != len(size.all_input_nodes) or None in inputs.values():
                return None
            with self.graph.inserting_before(first):
                local = self.graph.node_copy(size, lambda node: inputs[node] or node)
        local.meta.update(size.meta)
        self.stages[local.name] = self.stage
        self.made[size] = local
        return local


def _is_size(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, torch.SymInt)
