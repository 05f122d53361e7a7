"""Adapt a graph to the stages of its nodes, before it is cut.

``relay`` keeps autograd's order of adding gradients where stages read a value several times.

before:  stage 0: x = …     stage 1: a = f(x), b = g(x)                     stage 2: c = h(x)
after:   stage 0: x = …     stage 1: a = f(x), b = g(x), x_on_1 = alias(x)  stage 2: c = h(x_on_1)

Autograd adds the gradients of x one by one, from its last reader to its first: (h + g) + f. A
stage sends back one gradient; if that were g + f, the sum h + (g + f) could differ in its last
bits. So a stage that reads a value more than once, and is not the last to read it, passes the value
on to later stages. Their gradient then comes back to this stage and is added first. A value that
each stage reads once, such as a U-Net's skip, is sent directly to each of its readers.

``localise_sizes`` lets every stage compute the sizes that it reads, so that no integers are sent.

before:  stage 0: n = sym_size(x, 0), h = …        stage 1: view(h, [n, 8])   (n crosses)
after:   stage 0: n = sym_size(x, 0), h = …        stage 1: n_1 = sym_size(h, 0), view(h, [n_1, 8])
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpipe.ir.traced import Traced, Value
from fxpipe.passes.graph.lazy_module import copied
from fxpipe.passes.partition.assignment import Assignment, compute_nodes, differentiable


def relay(
    traced: Traced, assignment: Assignment, trained: Collection[str], outputs: Collection[str]
) -> tuple[Traced, Assignment]:
    """Let a stage pass on each value that it reads several times and that later stages read, too.

    Args:
        traced: the graph.
        assignment: the stages of its nodes.
        trained: the placeholders that get a gradient.
        outputs: the values whose gradients the caller gives.
    """
    copies: dict[fx.Node, fx.Node] = {}
    relayed = copied(traced, copies)
    relays = _Relays(relayed.graph, assignment.nodes, {a.name for a in traced.parameters})
    renamed = {
        node.name: relays.hand_on(copies[node], node.name in outputs)
        for node in differentiable(traced, trained)
        if isinstance(node.meta.get("val"), Tensor)
    }
    if len(relays.stages) == len(assignment.nodes):
        return traced, assignment
    relayed.graph.lint()
    returned = tuple(
        replace(out, name=renamed.get(out.name, out.name)) if isinstance(out, Value) else out
        for out in traced.outputs
    )
    return replace(relayed, outputs=returned), Assignment(assignment.stages, relays.stages)


class _Relays:
    """Adds the nodes to a graph that pass values on."""

    def __init__(self, graph: fx.Graph, stages: Mapping[str, int], parameters: set[str]) -> None:
        self.graph = graph
        self.end = graph.output_node()
        self.stages = dict(stages)
        self.parameters = parameters
        self.order = {node: place for place, node in enumerate(graph.nodes)}

    def hand_on(self, node: fx.Node, to_caller: bool) -> str:
        """Let each stage that reads a value several times pass it on to the stages after it.

        Returns the value's name as an output of the graph. If the caller gives its gradient, the
        last stage that passes it on also returns it; else the stage that computes it does.
        """
        readers = sorted(
            (n for n in node.users if n in self.order and n is not self.end),
            key=self.order.__getitem__,
        )
        current = node
        for stage in self._away(node, readers):
            here = [reader for reader in readers if self.stages[reader.name] == stage]
            # a reader of a later stage that runs before these cannot read what they pass on
            behind = [
                reader
                for reader in readers
                if self.stages[reader.name] > stage and self.order[reader] > self.order[here[-1]]
            ]
            if _reads(current, here) < 2 or not (behind or to_caller):
                continue
            alias, name = torch.ops.aten.alias.default, f"{node.name}_on_{stage}"
            with self.graph.inserting_after(here[-1]):
                copy = self.graph.create_node("call_function", alias, (current,), name=name)
            copy.meta.update(node.meta)
            self.stages[copy.name] = stage
            for reader in [*behind, *([self.end] if to_caller else [])]:
                reader.replace_input_with(current, copy)
            current = copy
        return current.name if to_caller else node.name

    def _away(self, node: fx.Node, readers: list[fx.Node]) -> list[int]:
        """The stages that receive a value from another stage, or from the caller."""
        reading = sorted({self.stages[reader.name] for reader in readers})
        if node.name in self.stages:
            return [stage for stage in reading if stage != self.stages[node.name]]
        return reading[1:] if node.name in self.parameters else reading


def _reads(node: fx.Node, readers: list[fx.Node]) -> int:
    """How often a value occurs among the arguments of some nodes."""
    return sum(
        argument is node
        for reader in readers
        for argument in pytree.tree_leaves((reader.args, dict(reader.kwargs)))
    )


def localise_sizes(traced: Traced, assignment: Assignment) -> tuple[Traced, Assignment]:
    """Let a stage compute the sizes that it reads from the tensors that it receives, if it can.

    A size that no received tensor has is sent on an edge, like any other value.
    """
    if not any(_is_size(node) for node in traced.graph.nodes):
        return traced, assignment
    copies: dict[fx.Node, fx.Node] = {}
    localised = copied(traced, copies)
    assert all(old.name == new.name for old, new in copies.items()), "a copy keeps its names"
    stages = {n.name: assignment.nodes[n.name] for n in compute_nodes(traced.graph)}
    for stage in range(assignment.stages):
        _Localiser(localised.graph, stages, stage).run()
    localised.graph.lint()
    return localised, Assignment(assignment.stages, stages)


class _Localiser:
    """Rewrites one stage of the copied graph."""

    def __init__(self, graph: fx.Graph, stages: dict[str, int], stage: int) -> None:
        self.graph = graph
        self.stages = stages
        self.stage = stage
        self.nodes = [n for n in compute_nodes(graph) if stages.get(n.name) == stage]
        self.locals: dict[fx.Node, fx.Node | None] = {}
        self.sources = self._sources()

    def run(self) -> None:
        for node in self.nodes:
            for size in node.all_input_nodes:
                if _is_size(size) and self.stages.get(size.name, self.stage) != self.stage:
                    local = self._local(size)
                    if local is not None and local < node:
                        node.replace_input_with(size, local)

    def _sources(self) -> Mapping[Hashable, tuple[fx.Node, int]]:
        """Size, as ``_key`` → the first tensor received by the stage that has this size, and its
        dimension."""
        arriving = {
            tensor
            for node in self.nodes
            for tensor in node.all_input_nodes
            if self.stages.get(tensor.name) != self.stage
        }
        sources: dict[Hashable, tuple[fx.Node, int]] = {}
        for tensor in sorted(arriving):
            value = tensor.meta.get("val")
            if isinstance(value, Tensor):
                for dimension, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt):
                        sources.setdefault(_key(size), (tensor, dimension))
        return sources

    def _local(self, size: fx.Node) -> fx.Node | None:
        """The size computed anew inside the stage; None if no tensor of the stage has it."""
        if size not in self.locals:
            self.locals[size] = self._computed(size)
        return self.locals[size]

    def _computed(self, size: fx.Node) -> fx.Node | None:
        source = self.sources.get(_key(size.meta["val"]))
        if source is not None:
            tensor, dimension = source
            inputs = {tensor: tensor}
            with self.graph.inserting_after(self._last([tensor])):
                local = self.graph.call_function(torch.ops.aten.sym_size.int, (tensor, dimension))
        else:
            copies = {node: self._local(node) for node in size.all_input_nodes if _is_size(node)}
            inputs = {node: copy for node, copy in copies.items() if copy is not None}
            if not inputs or len(inputs) != len(size.all_input_nodes):
                return None
            with self.graph.inserting_after(self._last(list(inputs.values()))):
                local = self.graph.node_copy(size, lambda node: inputs[node])
        local.meta.update(size.meta)
        self.stages[local.name] = self.stage
        return local

    def _last(self, nodes: list[fx.Node]) -> fx.Node:
        """The last of some nodes. If all are placeholders, the graph's last placeholder, to insert
        no node between placeholders."""
        last = max(nodes)
        while last.op == "placeholder" and last.next.op == "placeholder":
            last = last.next
        return last


def _key(size: torch.SymInt) -> Hashable:
    """The same for equal sizes. The graphs of the model and of its loss number their symbols each
    for itself."""
    return id(size.node.shape_env), size.node.expr


def _is_size(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, torch.SymInt)
