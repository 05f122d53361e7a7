"""Make random operations pure functions of (micro-batch seed, node number).

before:  native_dropout = aten.native_dropout.default(relu, 0.1, True)
after:   native_dropout = fxpipe.random.native_dropout(relu, 0.1, True, fxpipe_seed, 0)
         with ``fxpipe_seed`` a new input; this is the graph's random operation number 0

What is called as it is takes the same two numbers, and seeds its draws itself.

before:  drop = called.drop([relu], [])
after:   drop = called.drop([relu], [], fxpipe_seed, 0)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpipe import random
from fxpipe.errors import TraceError, way_out
from fxpipe.ir.traced import DRAWS, SEED, Traced
from fxpipe.passes.graph.lazy_module import copied
from fxpipe.torchtools import source

aten = torch.ops.aten


def seed_randomness(traced: Traced) -> Traced:
    """The same graph with every random operation seeded; unchanged if it has none.

    Raises:
        TraceError: a random operation has no seeded form; names its source line.
    """
    if not any(node.meta.get(DRAWS) or _seeded_form(node) for node in traced.graph.nodes):
        return traced
    traced = copied(traced)
    graph = traced.graph
    nodes = list(graph.nodes)
    with graph.inserting_before(nodes[0]):
        seed = graph.placeholder(SEED)
    seed.meta["val"] = torch.zeros((), dtype=torch.int64)
    number = 0
    for node in nodes:
        if (seeded := _seeded_form(node)) is not None:
            node.target, args, kwargs = seeded
            node.args = (*args, seed, number)
            node.kwargs = {k: v for k, v in kwargs.items() if k not in random.UNSEEDED}
            number += 1
    graph.lint()
    return traced


def _seeded_form(
    node: fx.Node,
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    if node.op != "call_function":
        return None
    target: Any = node.target
    if (seeds := node.meta.get(DRAWS)) is not None:
        return seeds, node.args, node.kwargs
    if target is aten.scaled_dot_product_attention.default:
        arguments = random.arguments_of(target, node.args, node.kwargs)
        dropout = arguments["dropout_p"]
        return (random.attention, tuple(arguments.values()), {}) if dropout else None
    if target in random.SEEDED and random.in_training(target, node.args, node.kwargs):
        return random.SEEDED[target], random.with_defaults(target, node.args), dict(node.kwargs)
    seeded = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    if seeded and random.draws(target, node.args, node.kwargs):
        cure = "draw with torch.rand or torch.randn instead"
        if "dropout" in random.arguments_of(target, node.args, node.kwargs):  # LSTM, GRU, RNN
            cure = "give each layer a module of its own, with nn.Dropout between them"
        raise TraceError(
            f"the random operation {target} at {source.of_node(node) or 'an unknown line'} "
            f"has no form that is a function of a seed; {cure}, or {way_out('')}"
        )
    return None
