"""Make random operations pure functions of (micro-batch seed, node number).

before:  native_dropout = aten.native_dropout.default(relu, 0.1, True)
after:   native_dropout = fxpipe.random.native_dropout(relu, 0.1, True, fxpipe_seed, 0)
         with ``fxpipe_seed`` a new input; this is the graph's random operation number 0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpipe import random, source
from fxpipe.errors import TraceError
from fxpipe.traced import SEED, Traced

aten = torch.ops.aten

_SEEDED: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: random.native_dropout,
    aten.bernoulli.default: random.bernoulli,
    aten.bernoulli.p: random.bernoulli_p,
    aten.rand_like.default: random.rand_like,
    aten.randn_like.default: random.randn_like,
    aten.rand.default: random.rand,
    aten.randn.default: random.randn,
    aten.randint.default: random.randint,
    aten.randint.low: random.randint_low,
    aten.randperm.default: random.randperm,
}
_ATTENTION: dict[str, Any] = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


def seed_randomness(traced: Traced) -> Traced:
    """The same graph with every random operation seeded; unchanged if it has none.

    Raises:
        TraceError: a random operation has no seeded form here; names its source line.
    """
    graph = traced.graph
    seed: fx.Node | None = None
    number = 0
    for node in list(graph.nodes):
        seeded = _seeded_form(node)
        if seeded is None:
            continue
        if seed is None:
            first = next(iter(graph.nodes))
            with graph.inserting_before(first):
                seed = graph.placeholder(SEED)
                seed.meta["val"] = torch.zeros((), dtype=torch.int64)
        target, args, kwargs = seeded
        node.target = target
        node.args = (*args, seed, number)
        node.kwargs = {k: v for k, v in kwargs.items() if k not in ("pin_memory", "layout")}
        number += 1
    if seed is None:
        return traced
    graph.lint()
    traced.module.recompile()
    return replace(traced, module=traced.module)


def _seeded_form(
    node: fx.Node,
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    if node.op != "call_function":
        return None
    target: Any = node.target
    if target is aten.scaled_dot_product_attention.default:
        given = _ATTENTION | dict(zip(_ATTENTION, node.args[3:], strict=False)) | dict(node.kwargs)
        if not given["dropout_p"]:
            return None
        return random.attention, (*node.args[:3], *given.values()), {}
    if target in _SEEDED:
        return _SEEDED[target], tuple(node.args), dict(node.kwargs)
    if isinstance(target, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded in target.tags and _draws(node):
            raise TraceError(
                f"the random operation {target} at {source.of_node(node) or 'an unknown line'} "
                "has no form that is a function of a seed; draw with torch.rand or torch.randn "
                'instead, or trace around it with tracer="symbolic"'
            )
    return None


def _draws(node: fx.Node) -> bool:
    """Whether a node that could draw does: not without dropout, and not in eval mode."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    names = [argument.name for argument in arguments]
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if False in (given.get("train"), given.get("training")):
        return False
    chances = [given.get(name, 0.0) for name in names if name in ("p", "dropout", "dropout_p")]
    return not chances or any(chances)
