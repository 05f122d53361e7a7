"""Make random operations pure functions of (micro-batch seed, node number).

before:  native_dropout = aten.native_dropout.default(relu, 0.1, True)
after:   native_dropout = fxpipe.random.native_dropout(relu, 0.1, True, fxpipe_seed, 0)
         with ``fxpipe_seed`` a new input; this is the graph's random operation number 0

A leaf module keeps its own operations. Its generator is seeded from the same two numbers.

before:  drop = self.drop(relu)
after:   draw_from = fxpipe.random.leaf_draws.draw_from(relu, fxpipe_seed, 0)
         drop = self.drop(draw_from)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpipe import random
from fxpipe.errors import TraceError
from fxpipe.ir.traced import DRAWS, DRAWS_FROM_OTHERS, SEED, Traced
from fxpipe.passes.graph.lazy_module import copied
from fxpipe.random import SEEDED, UNSEEDED, arguments_of, draws, in_training, with_defaults
from fxpipe.random.leaf_draws import draw_from
from fxpipe.torchtools import source

aten = torch.ops.aten


def seed_randomness(traced: Traced) -> Traced:
    """The same graph with every random operation seeded; unchanged if it has none.

    Raises:
        TraceError: there is no seeded form of a random operation; names its source line.
    """
    if not any(node.meta.get(DRAWS) or _seeded_form(node) for node in traced.graph.nodes):
        return traced
    traced = copied(traced)
    graph = traced.graph
    nodes, seed = list(graph.nodes), _seed(graph)
    number = 0
    for node in nodes:
        if node.meta.get(DRAWS):
            source_node = next(iter(node.all_input_nodes))
            others = (True,) if node.meta.get(DRAWS_FROM_OTHERS) else ()
            with graph.inserting_before(node):
                begun = graph.call_function(draw_from, (source_node, seed, number, *others))
            begun.meta.update(source_node.meta)
            for key in ("nn_module_stack", "stack_trace"):  # those of the module that draws
                begun.meta[key] = node.meta.get(key)
            node.replace_input_with(source_node, begun)
            number += 1
            continue
        seeded = _seeded_form(node)
        if seeded is None:
            continue
        target, args, kwargs = seeded
        node.target = target
        node.args = (*args, seed, number)
        node.kwargs = {k: v for k, v in kwargs.items() if k not in UNSEEDED}
        number += 1
    graph.lint()
    return traced


def _seed(graph: fx.Graph) -> fx.Node:
    with graph.inserting_before(next(iter(graph.nodes))):
        seed = graph.placeholder(SEED)
    seed.meta["val"] = torch.zeros((), dtype=torch.int64)
    return seed


def _seeded_form(
    node: fx.Node,
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    if node.op != "call_function":
        return None
    target: Any = node.target
    if target is aten.scaled_dot_product_attention.default:
        given = arguments_of(target, node.args, node.kwargs)
        return (random.attention, tuple(given.values()), {}) if given["dropout_p"] else None
    if target in SEEDED and in_training(target, node.args, node.kwargs):
        return SEEDED[target], with_defaults(target, node.args), dict(node.kwargs)
    if isinstance(target, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded in target.tags and draws(
            target, node.args, node.kwargs
        ):
            raise TraceError(
                f"the random operation {target} at {source.of_node(node) or 'an unknown line'} "
                "has no form that is a function of a seed; draw with torch.rand or torch.randn "
                'instead, or trace around it with tracer="symbolic"'
            )
    return None
