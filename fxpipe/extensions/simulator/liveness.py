"""Find when each storage that a graph touches is alive while the graph runs.

before:  a = mm(x, w); b = relu_(a); c = view(b); d = mm(c, v); return (d, b)
after:   the storage of a, b and c: from step 0 to the return       d: from step 3 to the return

A graph runs node by node. A value exists from its node on, and is dropped after the last node that
reads it, as in the generated code. A view shares the storage of its base, and an operation that
writes over an operand makes no new storage. The workspace that an operation needs while it runs
does not show in a graph and is not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fxpipe.kernels.graph import onto
from fxpipe.torchtools.pytrees import in_blocks


class Life(NamedTuple):
    """The life of one storage.

    Attributes:
        bytes: its size.
        first: the step that makes it; −1 for an argument.
        last: the last step at which it exists. Results, and arguments that no node reads, exist
            until the return, which is one step after the last node.
    """

    bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Liveness:
    """The storages of a graph.

    Attributes:
        steps: how many nodes compute.
        spans: storage → its life.
        of: node → the storages of its value.
    """

    steps: int
    spans: dict[int, Life]
    of: Mapping[fx.Node, tuple[int, ...]]

    def lies_in(self, nodes: Iterable[Any]) -> tuple[int, ...]:
        """The storages of some values, each once; values that are no nodes have none."""
        of_nodes = (self.of[node] for node in nodes if isinstance(node, fx.Node))
        return tuple(dict.fromkeys(storage for storages in of_nodes for storage in storages))


def liveness(
    graph: fx.Graph,
    shared: Sequence[Sequence[Hashable]] = (),
    absent: Collection[fx.Node] = (),
    block: int = 1,
) -> Liveness:
    """The life of every storage of a graph whose nodes have example values (``meta["val"]``).

    Args:
        graph: the graph.
        shared: for each of the first arguments, a name for each of its storages; storages with
            equal names are one. The other arguments share no memory, even if their example values
            do.
        absent: arguments that are None, such as gradient sums before the first micro-batch.
        block: of how many bytes the size of a storage is a multiple.
    """
    *nodes, output = graph.nodes
    computing = [node for node in nodes if node.op != "placeholder"]
    step = {node: place for place, node in enumerate([*computing, output])}
    # node → storage of its example value → number of the storage
    of: dict[fx.Node, dict[int, int]] = {node: {} for node in absent}
    arguments = (node for node in nodes if node.op == "placeholder")
    names = {n: own for n, own in zip(arguments, shared, strict=False) if n not in of}
    numbers: dict[Hashable, int] = {}

    def number(name: Hashable) -> int:
        return numbers.setdefault(name, len(numbers))

    spans: dict[int, Life] = {}
    for node in nodes:
        sizes = {} if node in of else {key: in_blocks(x, block) for key, x in _storages(node)}
        if over := [storage for operand in _written_over(node) for storage in of[operand].values()]:
            of[node] = dict(zip(sizes, over, strict=True))
        elif node in names:
            own = zip(sizes, names[node], strict=True)
            of[node] = {key: number(("shared", name)) for key, name in own}
        else:
            shown = dict(pair for x in reversed(node.all_input_nodes) for pair in of[x].items())
            of[node] = {key: shown[key] if key in shown else number((node, key)) for key in sizes}
        first = step.get(node, -1)
        unread = len(computing) if node.op == "placeholder" else first
        last = max((step[user] for user in node.users), default=unread)
        for storage, size in zip(of[node].values(), sizes.values(), strict=True):
            span = spans.setdefault(storage, Life(size, first, last))
            spans[storage] = span._replace(last=max(span.last, last))
    lies_in = {node: tuple(found.values()) for node, found in of.items()}
    return Liveness(len(computing), spans, lies_in)


def _written_over(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that an operation writes its results over."""
    if node.target is onto:
        yield node.all_input_nodes[0]
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            operand = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(operand, fx.Node):
                yield operand


_aten = torch.ops.aten
_WHOLE_LOSSES = {
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.soft_margin_loss.default,
    _aten.binary_cross_entropy.default,
}
"""Losses that first write the loss of each element, and then the sum into the same storage, which
keeps its size."""


def _storages(node: fx.Node) -> Iterator[tuple[int, int]]:
    """The storages of a node's example value, with their bytes."""
    least = 0
    if node.target in _WHOLE_LOSSES:
        least = max(operand.meta["val"].nbytes for operand in node.all_input_nodes)
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            yield storage._cdata, max(int(storage.nbytes()), least)
