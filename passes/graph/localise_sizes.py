"""Let every stage compute the sizes that it reads, so that no integers are sent.

before:  stage 0: n = sym_size(x, 0), h = …        stage 1: view(h, [n, 8])   (n crosses)
after:   stage 0: n = sym_size(x, 0), h = …        stage 1: n_1 = sym_size(h, 0), view(h, [n_1, 8])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpipe.ir.traced import Traced
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.passes.partition.assignment import Assignment, compute_nodes


def localise_sizes(traced: Traced, assignment: Assignment) -> tuple[Traced, Assignment]:
    """Compute each size that a later stage reads from a tensor that this stage receives anyway.

    A size that no such tensor has is sent as an edge, like any other value.
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
    module = lazy_module(traced.module, graph)
    names = {old.name: new.name for old, new in copies.items()}
    assert all(old == new for old, new in names.items()), "copying a graph keeps its names"
    return replace(traced, module=module), Assignment(assignment.stages, stages)


class _Localiser:
    """Works on one stage of the copied graph.

    Attributes:
        order: node → its index in the graph; a new node has that of the last node it reads.
        made: size of another stage → the same size computed in this stage.
    """

    def __init__(self, graph: fx.Graph, stages: dict[str, int], stage: int) -> None:
        self.graph = graph
        self.stages = stages
        self.stage = stage
        self.nodes = [n for n in compute_nodes(graph) if stages.get(n.name) == stage]
        self.order = {node: place for place, node in enumerate(graph.nodes)}
        self.made: dict[fx.Node, fx.Node | None] = {}
        self.sources = self._sources()

    def run(self) -> None:
        for node in self.nodes:
            for size in node.all_input_nodes:
                if _is_size(size) and self.stages.get(size.name, self.stage) != self.stage:
                    local = self._local(size)
                    if local is not None and self.order[local] < self.order[node]:
                        node.replace_input_with(size, local)

    def _sources(self) -> Mapping[str, tuple[fx.Node, int]]:
        """Size, as an expression → the first tensor received by the stage that has it, and in
        which dimension."""
        arriving = {
            tensor
            for node in self.nodes
            for tensor in node.all_input_nodes
            if self.stages.get(tensor.name) != self.stage
        }
        found: dict[str, tuple[fx.Node, int]] = {}
        for tensor in sorted(arriving, key=self.order.__getitem__):
            value = tensor.meta.get("val")
            if isinstance(value, torch.Tensor):
                for dimension, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt):
                        found.setdefault(str(size), (tensor, dimension))
        return found

    def _local(self, size: fx.Node) -> fx.Node | None:
        """The size computed anew inside the stage; None if no tensor of the stage has it."""
        if size not in self.made:
            self.made[size] = self._copied(size)
        return self.made[size]

    def _copied(self, size: fx.Node) -> fx.Node | None:
        source = self.sources.get(str(size.meta["val"]))
        if source is not None:
            tensor, dimension = source
            inputs = {tensor: tensor}
            with self.graph.inserting_after(self._last([tensor])):
                local = self.graph.call_function(torch.ops.aten.sym_size.int, (tensor, dimension))
        else:
            found = {node: self._local(node) for node in size.all_input_nodes if _is_size(node)}
            inputs = {node: copy for node, copy in found.items() if copy is not None}
            if not inputs or len(inputs) != len(size.all_input_nodes):
                return None
            with self.graph.inserting_after(self._last(list(inputs.values()))):
                local = self.graph.node_copy(size, lambda node: inputs[node])
        local.meta.update(size.meta)
        self.stages[local.name] = self.stage
        self.order[local] = max(self.order[node] for node in inputs.values())
        return local

    def _last(self, nodes: list[fx.Node]) -> fx.Node:
        """The last of some nodes; the graph's last placeholder if all are placeholders, so that no
        node is inserted among these."""
        last = max(nodes, key=self.order.__getitem__)
        while last.op == "placeholder" and last.next.op == "placeholder":
            last = last.next
        return last


def _is_size(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, torch.SymInt)
