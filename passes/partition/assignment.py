"""Say which stage computes each node of a graph, and which nodes must share a stage.

before:  conv_1, relu_1, conv_2, relu_2            (in the order of the program)
after:   {"conv_1": 0, "relu_1": 0, "conv_2": 1, "relu_2": 1}

Every edge runs forward. ``balance`` makes an assignment by costs, ``cut_at`` by names of
submodules, and ``place_like`` carries one over to another graph of the same model.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpipe.ir.called import calls_in
from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.work import StageLoad
from fxpipe.torchtools.source import module_paths


@dataclass(frozen=True)
class Bond:
    """Nodes that must share a stage.

    Attributes:
        nodes: several nodes.
        what: they are, in words.
    """

    nodes: Sequence[fx.Node]
    what: str


@dataclass(frozen=True)
class Assignment:
    """The stage of each node.

    Attributes:
        stages: the number of stages.
        nodes: node name → stage, for every node that computes.
        loads: stage → load, for one micro-batch; empty if no costs were known.
    """

    stages: int
    nodes: Mapping[str, int]
    loads: tuple[StageLoad, ...] = field(default=(), compare=False)


def one_stage(traced: Traced) -> Assignment:
    """Assign the whole graph to one stage, to measure its nodes."""
    return Assignment(1, {node.name: 0 for node in compute_nodes(traced.graph)})


def first_readers(traced: Traced, assignment: Assignment) -> dict[str, int]:
    """Parameter or buffer (its name in the model) → the first stage that reads it."""
    return {
        target: min(
            (assignment.nodes[n.name] for n in nodes if n.name in assignment.nodes), default=0
        )
        for target, nodes in readers(traced).items()
    }


def readers(traced: Traced) -> dict[str, list[fx.Node]]:
    """Parameter or buffer (its name in the model) → the nodes that read it."""
    targets = {a.name: a.target for a in (*traced.parameters, *traced.buffers)}
    return {
        targets[node.name]: list(node.users) for node in traced.graph.nodes if node.name in targets
    }


def differentiable(traced: Traced, trained: Collection[str]) -> dict[fx.Node, None]:
    """Return the nodes that may get a gradient, in order; those of unknown value are included.

    Args:
        traced: the graph.
        trained: the placeholders that get a gradient.
    """
    nodes: dict[fx.Node, None] = {}
    for node in traced.graph.nodes:
        if node.op != "output" and (
            node.name in trained or any(n in nodes for n in node.all_input_nodes)
        ):
            value = node.meta.get("val")
            if value is None or any(map(_is_float, pytree.tree_leaves(value))):
                nodes[node] = None
    return nodes


def turns(traced: Traced, nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the pairs of consecutive readers of a value that may both send a gradient back to it,
    also where parameters are frozen now, or no input requires a gradient: that may change.

    Autograd adds these gradients from the last reader to the first. Stages add them in the same
    order if no reader is in an earlier stage than the one before it. ``nodes`` are the compute
    nodes in the order in which they run.
    """
    place = {node: index for index, node in enumerate(nodes)}
    inputs = [name for name in traced.inputs if name is not None]
    back = differentiable(traced, {*inputs, *(argument.name for argument in traced.parameters)})
    for node in back:
        users = [user for user in node.users if user in place and user in back]
        yield from itertools.pairwise(sorted(users, key=place.__getitem__))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def compute_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that a stage computes: all but placeholders and the output."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def in_order(traced: Traced) -> list[fx.Node]:
    """Return the compute nodes in the program's order, but with constants right before their use.

    A constant depends on parameters and buffers only, such as a weight that is cast to another
    dtype. No cut should fall between it and its first use.
    """
    waiting: set[fx.Node] = set()
    constant = constants(traced)
    ordered: list[fx.Node] = []

    def place(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in waiting:
                waiting.discard(source)
                place(source)
        ordered.append(node)

    for node in compute_nodes(traced.graph):
        if node in constant and any(user.op != "output" for user in node.users):
            waiting.add(node)
        else:
            place(node)
    ordered += (node for node in compute_nodes(traced.graph) if node in waiting)
    return ordered


def constants(traced: Traced) -> set[fx.Node]:
    """The nodes that depend on no input of the call."""
    held = {argument.name for argument in (*traced.parameters, *traced.buffers)}
    nodes: set[fx.Node] = set()
    for node in compute_nodes(traced.graph):
        sources = node.all_input_nodes
        if node.op == "call_function" and all(n in nodes or n.name in held for n in sources):
            nodes.add(node)
    return nodes


def is_within(node: fx.Node, module: str) -> bool:
    """Whether a node belongs to a submodule or to one inside it."""
    return any(path == module or path.startswith(module + ".") for path in module_paths(node))


def bonds(traced: Traced, nodes: Sequence[fx.Node]) -> Iterator[Bond]:
    """Yield the groups of nodes that must share a stage.

    - All nodes that read or write a buffer that is written: the next micro-batch reads what this
      one wrote.
    - All calls of a part of the model that read the same parameter or buffer.
    - An operation with several results, and the nodes that pick one of them.
    - A constant, which depends on no input, and its first use. A constant without uses, such as a
      counter of calls, shares a stage with its module's first node.
    """
    place = {node: index for index, node in enumerate(nodes)}
    by_name = {node.name: node for node in nodes}
    written = {write.target: write.value for write in traced.writes}
    for target, users in readers(traced).items():
        if target in written:
            group = [user for user in users if user in place]
            group += [by_name[name] for name in (written[target],) if name in by_name]
            if len(group) > 1:
                yield Bond(group, f"what uses the written buffer {target!r}")
    held = {a.name for a in (*traced.parameters, *traced.buffers)}
    for (one, function), (two, other) in itertools.combinations(calls_in(nodes).items(), 2):
        shared = {*one.all_input_nodes} & {*two.all_input_nodes}
        if function.parts & other.parts and any(node.name in held for node in shared):
            yield Bond([one, two], f"the calls of {function.name!r}")
    constant = constants(traced)
    calls: dict[tuple[str, ...], fx.Node] = {}
    for node in nodes:
        if node not in constant and (paths := module_paths(node)):
            calls.setdefault(tuple(paths), node)
    for node in nodes:
        users = [user for user in node.users if user in place]
        parts = [user for user in users if is_part(user)]
        if parts:
            yield Bond([node, *parts], f"{node.name} and what reads it")
        elif node in constant and users:
            first = min(users, key=place.__getitem__)
            yield Bond([node, first], "constants and their first uses")
        elif node in constant and (call := calls.get(tuple(module_paths(node)))):
            yield Bond([node, call], "constants and their modules")


def is_part(node: fx.Node) -> bool:
    """Whether a node picks one of an operation's several results."""
    return (
        node.op == "call_function"
        and getattr(node.target, "__name__", "") == "getitem"
        and isinstance(node.args[0], fx.Node)
        and not hasattr(node.args[0].meta.get("val"), "dtype")
        and isinstance(node.args[1], int | str)
    )


def place_like(traced: Traced, reference: Traced, assignment: Assignment) -> Assignment:
    """Carry an assignment over to another graph of the same model, such as its eval-mode graph.

    A node gets the stage of the same call in the same submodule of the reference. Parameters stay
    on their stage. A node without a counterpart gets the stage of its inputs, or that of an earlier
    reader of these, so that gradients are still added in the model's order.
    """
    parameter_stage = first_readers(reference, assignment)
    floors: defaultdict[str, list[int]] = defaultdict(list)  # the stages of the parameters it reads
    for target, nodes in readers(traced).items():
        for node in nodes:
            if target in parameter_stage:
                floors[node.name].append(parameter_stage[target])
    by_call = {key: assignment.nodes[node.name] for key, node in _calls(reference)}
    by_module: dict[str, int] = {}
    for (module, _, _), stage in by_call.items():
        by_module[module] = min(stage, by_module.get(module, stage))
    placed: dict[str, int] = {}
    for key, node in _calls(traced):
        sources = [placed.get(n.name, 0) for n in node.all_input_nodes]
        earliest = max([*sources, *floors.get(node.name, [])], default=0)
        fallback = earliest if node.name in floors else by_module.get(key[0], earliest)
        placed[node.name] = max(by_call.get(key, fallback), earliest)
    _settle(traced, placed)
    return Assignment(assignment.stages, placed)


def _calls(traced: Traced) -> Iterator[tuple[tuple[str, str, int], fx.Node]]:
    """Yield each compute node with a key: its submodule, its operation, and its number among the
    nodes of that operation in that submodule."""
    counts: Counter[tuple[str, str]] = Counter()
    for node in compute_nodes(traced.graph):
        paths = module_paths(node)
        where = (paths[-1] if paths else "", str(node.target))
        yield (*where, counts[where]), node
        counts[where] += 1


def _settle(traced: Traced, placed: dict[str, int]) -> None:
    """Move nodes to later stages until edges run forward, no group of ``bonds`` is split, and
    readers of a value keep their ``turns``."""
    nodes = in_order(traced)
    bound = [[node.name for node in bond.nodes] for bond in bonds(traced, nodes)]
    before: defaultdict[str, list[str]] = defaultdict(list)
    for node in nodes:
        before[node.name] += (source.name for source in node.all_input_nodes)
    for first, second in turns(traced, nodes):
        before[second.name].append(first.name)
    moved = True
    while moved:
        moved = False
        for node in nodes:
            floor = max((placed.get(name, 0) for name in before[node.name]), default=0)
            if placed[node.name] < floor:
                placed[node.name], moved = floor, True
        for bond in bound:
            latest = max(placed[name] for name in bond)
            for name in bond:
                if placed[name] < latest:
                    placed[name], moved = latest, True
