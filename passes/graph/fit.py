"""Adapt a graph to the stages of its nodes, before it is cut.

``relay`` keeps autograd's order of adding gradients where stages read a value several times.

before:  stage 0: x = …     stage 1: a = f(x), b = g(x)                     stage 2: c = h(x)
after:   stage 0: x = …     stage 1: a = f(x), b = g(x), x_on_1 = alias(x)  stage 2: c = h(x_on_1)

Autograd adds the gradients of x one by one, from its last reader to its first: (h + g) + f. A
stage sends back one gradient; if that were g + f, the sum h + (g + f) could differ in its last
bits. So a stage that reads a value more than once, and is not the last to read it, passes the value
on to later stages. Their gradient then comes back to this stage and is added first. A value that
each stage reads once, such as a U-Net's skip, is sent directly to each of its readers.

``put_sizes`` puts in the sizes of a micro-batch, so that no stage computes or sends them.

before:  n = sym_size(x, 0);  m = mul(n, 2);  view = view(h, [m, 8])
after:   view = view(h, [12, 8])                                        for six samples
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpipe.ir.traced import Traced, Value
from fxpipe.passes.graph.lazy_module import copied
from fxpipe.passes.partition.assignment import Assignment, differentiable


def relay(
    traced: Traced, assignment: Assignment, trained: Collection[str], outputs: Collection[str]
) -> tuple[Traced, Assignment]:
    """Let a stage pass on each value that it reads several times and that later stages read, too.

    Args:
        traced: the graph.
        assignment: the stages of its nodes.
        trained: the placeholders that get a gradient; under autograd any value may get one.
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


def put_sizes(traced: Traced, values: Mapping[str, Any]) -> Traced:
    """The same graph for the sizes of its inputs; only sizes that it returns are still computed.

    Args:
        traced: the graph.
        values: input → an example of the size of one micro-batch.
    """
    if not any(_is_size(node) for node in traced.graph.nodes):
        return traced
    sized = copied(traced)
    known: dict[Any, Any] = {}  # the graphs of the model and its loss each have a size environment
    numbers: dict[fx.Node, Any] = {}

    def learn(size: Any, number: Any) -> None:
        if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
            known.setdefault((id(size.node.shape_env), size.node.expr), number)

    def number_of(size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        env, expression = id(size.node.shape_env), size.node.expr
        return int(expression.xreplace({s: known[env, s] for s in expression.free_symbols}))

    for node in sized.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor) and node.name in values:
            for size, number in zip(value.shape, values[node.name].shape, strict=True):
                learn(size, number)
        if node.op != "output":
            node.args, node.kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda n: numbers.get(n, n)
            )
        if _is_size(node):
            read = node.all_input_nodes
            with suppress(KeyError):  # no input tells it: the stage that makes it sends it
                if node.target is torch.ops.aten.sym_size.int:
                    numbers[node] = number_of(read[0].meta["val"].shape[node.args[1]])
                    learn(value, numbers[node])
                elif not read:
                    numbers[node] = node.target(*node.args, **node.kwargs)
    for node in reversed(numbers):
        if not node.users:
            sized.graph.erase_node(node)
    sized.graph.lint()
    return sized


def _is_size(node: fx.Node) -> bool:
    """Whether a node computes a size, or a fraction or comparison of sizes."""
    symbols = torch.SymInt | torch.SymFloat | torch.SymBool
    return node.op == "call_function" and isinstance(node.meta.get("val"), symbols)
