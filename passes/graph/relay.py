"""Keep autograd's order of adding gradients, where stages read a value several times.

before:  stage 0: x = …     stage 1: a = f(x), b = g(x)                     stage 2: c = h(x)
after:   stage 0: x = …     stage 1: a = f(x), b = g(x), x_on_1 = alias(x)  stage 2: c = h(x_on_1)

Autograd adds the gradients of x one by one, from its last reader to its first: (h + g) + f. A
stage sends back one gradient; were that g + f, the sum h + (g + f) could differ in its last bits.
So a stage that reads a value more than once, and is not the last to read it, sends the value on to
later stages. Their gradient then comes back to this stage and is added first. A value that each
stage reads once, such as a U-Net's skips, is sent directly to each of its readers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpipe.ir.traced import Traced, Value
from fxpipe.passes.graph.lazy_module import lazy_module
from fxpipe.passes.partition.assignment import Assignment, differentiable


def relay(
    traced: Traced, assignment: Assignment, trained: Collection[str], outputs: Collection[str]
) -> tuple[Traced, Assignment]:
    """Let a stage send on each value that it reads several times and that later stages read, too.

    Args:
        traced: the graph.
        assignment: the stages of its nodes.
        trained: the placeholders that get a gradient; with leaf modules any value may get one.
        outputs: the values whose gradients the caller gives.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(traced.graph, copies)
    returned = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    end = graph.output(fx.map_arg(returned, lambda node: copies[node]))
    relays = _Relays(graph, end, assignment.nodes, {a.name for a in traced.parameters})
    renamed = {
        node.name: relays.hand_on(copies[node], node.name in outputs)
        for node in differentiable(traced, trained)
        if isinstance(node.meta.get("val"), Tensor)
    }
    if len(relays.stages) == len(assignment.nodes):
        return traced, assignment
    graph.lint()
    given = tuple(
        replace(out, name=renamed.get(out.name, out.name)) if isinstance(out, Value) else out
        for out in traced.outputs
    )
    module = lazy_module(traced.module, graph)
    stages = Assignment(assignment.stages, relays.stages)
    return replace(traced, module=module, outputs=given), stages


class _Relays:
    """Adds the nodes to a graph that send values on.

    Attributes:
        stages: node → its stage, the new nodes among them.
    """

    def __init__(
        self, graph: fx.Graph, end: fx.Node, stages: Mapping[str, int], parameters: set[str]
    ) -> None:
        self.graph = graph
        self.end = end
        self.stages = dict(stages)
        self.parameters = parameters
        self.order = {node: place for place, node in enumerate(graph.nodes)}

    def hand_on(self, node: fx.Node, to_caller: bool) -> str:
        """Let each stage that reads a value several times send it to the stages after it.

        Returns:
            What the graph returns it as, if it does: to the caller from the last stage that reads
            it, or, where the caller gives no gradient, from the stage that makes it.
        """
        readers = sorted(
            (n for n in node.users if n in self.order and n is not self.end),
            key=self.order.__getitem__,
        )
        current = node
        for stage in self._away(node, readers):
            here = [reader for reader in readers if self.stages[reader.name] == stage]
            behind = [reader for reader in readers if self.stages[reader.name] > stage]
            if _reads(current, here) < 2 or not (behind or to_caller):
                continue
            with self.graph.inserting_after(here[-1]):
                copy = self.graph.create_node(
                    "call_function",
                    torch.ops.aten.alias.default,
                    (current,),
                    name=f"{node.name}_on_{stage}",
                )
            copy.meta.update(node.meta)
            self.stages[copy.name] = stage
            for reader in [*behind, *([self.end] if to_caller else [])]:
                reader.replace_input_with(current, copy)
            current = copy
        return current.name if to_caller else node.name

    def _away(self, node: fx.Node, readers: list[fx.Node]) -> list[int]:
        """The stages that receive a value from another stage, or from the caller."""
        found = sorted({self.stages[reader.name] for reader in readers})
        if node.name in self.stages:
            return [stage for stage in found if stage != self.stages[node.name]]
        return found[1:] if node.name in self.parameters else found


def _reads(node: fx.Node, readers: list[fx.Node]) -> int:
    """How often a value occurs among the arguments of some nodes."""
    return sum(
        argument is node
        for reader in readers
        for argument in pytree.tree_leaves((reader.args, dict(reader.kwargs)))
    )
