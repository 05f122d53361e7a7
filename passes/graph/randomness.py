"""Make random operations pure functions of (micro-batch seed, node number).

before:  native_dropout = aten.native_dropout.default(relu, 0.1, True)
after:   native_dropout = fxpipe.random.native_dropout(relu, 0.1, True, fxpipe_seed, 0)
         with ``fxpipe_seed`` a new input; this is the graph's random operation number 0

A leaf module keeps its own operations. Its generator is seeded from the same two numbers.

before:  drop = self.drop(relu)
after:   draw_from = fxpipe.random.leaf_draws.draw_from(relu, fxpipe_seed, 0)
         drop = self.drop(draw_from)

Inside of ``FixedDraws`` all draw one fixed pattern, the model's own operations and the seeded ones,
so that two runs can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree

from fxpipe import random
from fxpipe.errors import TraceError
from fxpipe.ir.traced import DRAWS, DRAWS_FROM_OTHERS, SEED, Traced
from fxpipe.passes.graph.lazy_module import copied
from fxpipe.random.leaf_draws import Draws, draw_from, seed_others
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
        node.kwargs = {k: v for k, v in kwargs.items() if k not in random.UNSEEDED}
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
        given = random.arguments_of(target, node.args, node.kwargs)
        return (random.attention, tuple(given.values()), {}) if given["dropout_p"] else None
    if target in random.SEEDED and random.in_training(target, node.args, node.kwargs):
        return random.SEEDED[target], random.with_defaults(target, node.args), dict(node.kwargs)
    if isinstance(target, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded in target.tags and random.draws(
            target, node.args, node.kwargs
        ):
            raise TraceError(
                f"the random operation {target} at {source.of_node(node) or 'an unknown line'} "
                "has no form that is a function of a seed; draw with torch.rand or torch.randn "
                'instead, or trace around it with tracer="symbolic"'
            )
    return None


def pattern(like: Tensor) -> Tensor:
    """Numbers in [0, 1) that depend on the position only: the fractions of multiples of φ."""
    places = torch.arange(like.numel(), dtype=torch.float64, device=like.device)
    return ((places + 1) * 0.6180339887498949).frac().reshape(like.shape)


class FixedDraws(Draws):
    """Inside, every random operation draws the same numbers: those of one generator or, where what
    is drawn depends on values, which two runs may round otherwise, those of a fixed pattern."""

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation returns inside."""
        name = func._schema.name.partition("::")[2].rstrip("_")
        if name == "native_dropout" and args[2] is not False and 0 < args[1] < 1:
            mask = pattern(args[0]) < 1 - args[1]
            return args[0] * mask * (1 / (1 - args[1])), mask
        if name == "rrelu_with_noise" and (given := _given(func, args, kwargs)).get("training"):
            return _sloped(func, *(given[key] for key in ("self", "noise", "lower", "upper")))
        seeded = func in random.OPERATORS
        if not seeded and torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if name in _DRAWS:
            out = func(*args, **kwargs)
            given = _given(func, *pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs)))
            numbers = _DRAWS[name](pattern(out), next(iter(given.values())), given)
            return out.copy_(numbers) if not out.requires_grad else numbers.to(out)
        if seeded:
            return func(*args[:-2], torch.tensor(0), 0, **kwargs)
        if (drawing := random.with_generator(func)) is None:
            return func(*args, **kwargs)
        device = args[0].device if args and isinstance(args[0], Tensor) else "cpu"
        return drawing(
            *random.with_defaults(func, args), **{**kwargs, "generator": _generator(device)}
        )


def _generator(device: Any) -> torch.Generator:
    return torch.Generator(device).manual_seed(random.mix(0, 0))


@contextmanager
def fixed_others() -> Iterator[None]:
    """Inside, Python's and NumPy's global generators begin anew where this thread begins or ends a
    call of a module, so that what is drawn from them depends on the place in its code alone."""
    thread = get_ident()

    def begin(*_: Any) -> None:
        if get_ident() == thread:
            seed_others(0)

    before = hooks.register_module_forward_pre_hook(begin)
    after = hooks.register_module_forward_hook(begin)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What an operation is given, by name, without what is None."""
    given = random.arguments_of(func, args, kwargs)
    return {name: value for name, value in given.items() if value is not None}


def _sloped(func: Any, x: Tensor, noise: Tensor, lower: float, upper: float) -> Tensor:
    """``rrelu_with_noise``: its second argument receives the slopes, for the backward."""
    slopes = torch.empty_like(x).uniform_(lower, upper, generator=_generator(x.device))
    noise.copy_(torch.where(x > 0, 1.0, slopes))
    made: Tensor = x * noise
    return x.copy_(made) if func._schema.is_mutable and func._schema.name.endswith("_") else made


def _heaviest(u: Tensor, x: Any, given: Mapping[str, Any]) -> Any:
    order: Tensor = x.argsort(stable=True, dim=-1, descending=True)
    count = given["num_samples"]
    return order[..., torch.arange(count, device=order.device) % order.shape[-1]]


_DRAWS: dict[str, Callable[[Tensor, Any, Mapping[str, Any]], Any]] = {
    "bernoulli": lambda u, x, given: u < given.get("p", x),
    "poisson": lambda u, x, given: (u * 2 * x).floor(),
    "_standard_gamma": lambda u, x, given: (u + 0.5) * x,
    "multinomial": _heaviest,
}
"""Each takes the pattern, the operation's first argument, and all of them by name."""
