"""Let gradients meet in autograd's order where a value is read several times in several stages.

before:  stage 0: x = …     stage 1: a = f(x), b = g(x)                     stage 2: c = h(x)
after:   stage 0: x = …     stage 1: a = f(x), b = g(x), x_on_1 = alias(x)  stage 2: c = h(x_on_1)

Autograd adds the gradients of x one by one, from its last reader to its first: (h + g) + f. A
stage hands back one gradient; were that g + f, the sum h + (g + f) could differ in its last bits.
So a stage that reads a value more than once, and is not the last to read it, hands the value on,
and the gradient from behind comes in where it belongs. A value that each stage reads once, as a
U-Net's skips, travels straight.
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
    """Hand on what is read several times in a stage and again behind it.

    Args:
        traced: the graph.
        assignment: its stages.
        trained: the placeholders that get a gradient; with leaf modules every value may.
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
    """Adds to a graph the nodes that hand a value on.

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
        """Let each stage that reads a value several times send it to those behind.

        Returns:
            What the last stage to read it calls the value.
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
        return current.name

    def _away(self, node: fx.Node, readers: list[fx.Node]) -> list[int]:
        """The stages that get a value from another one, or from the caller."""
        found = sorted({self.stages[reader.name] for reader in readers})
        if node.name in self.stages:
            return [stage for stage in found if stage != self.stages[node.name]]
        return found[1:] if node.name in self.parameters else found


def _reads(node: fx.Node, readers: list[fx.Node]) -> int:
    """How often a value stands among the arguments of some nodes."""
    return sum(
        argument is node
        for reader in readers
        for argument in pytree.tree_leaves((reader.args, dict(reader.kwargs)))
    )
