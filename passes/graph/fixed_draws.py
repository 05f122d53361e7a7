"""Let all random operations draw one fixed pattern, so that two runs can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree

from fxpipe.random import arguments_of, with_defaults
from fxpipe.random.leaf_draws import Draws, seed_others


def pattern(like: Tensor) -> Tensor:
    """Numbers in [0, 1) that depend on the position only: the fractions of multiples of φ."""
    places = torch.arange(like.numel(), dtype=torch.float64, device=like.device)
    return ((places + 1) * 0.6180339887498949).frac().reshape(like.shape)


class FixedDraws(Draws):
    """Inside, every random operation draws the same fixed pattern."""

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation returns inside."""
        name = func._schema.name.partition("::")[2].rstrip("_")
        if name == "native_dropout" and args[2] is not False and 0 < args[1] < 1:
            mask = pattern(args[0]) < 1 - args[1]
            return args[0] * mask * (1 / (1 - args[1])), mask
        if name == "rrelu_with_noise" and (given := _given(func, args, kwargs)).get("training"):
            return _sloped(func, *(given[key] for key in ("self", "noise", "lower", "upper")))
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace == "fxpipe":
            draw = _DRAWS.get(name)
            if draw is not None:
                out = func(*args, **kwargs)
                given = _given(func, *pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs)))
                numbers = draw(pattern(out), next(iter(given.values())), given)
                return out.copy_(numbers) if not out.requires_grad else numbers.to(out)
            if any(argument.name == "generator" for argument in func._schema.arguments):
                device = args[0].device if args and isinstance(args[0], Tensor) else "cpu"
                generator = torch.Generator(device).manual_seed(0)
                return func(*with_defaults(func, args), **{**kwargs, "generator": generator})
        return func(*args, **kwargs)


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
    given = arguments_of(func, args, kwargs)
    return {name: value for name, value in given.items() if value is not None}


def _sloped(func: Any, x: Tensor, noise: Tensor, lower: float, upper: float) -> Tensor:
    """``rrelu_with_noise``: its second argument receives the slopes, for the backward."""
    noise.copy_(torch.where(x > 0, 1.0, pattern(x) * (upper - lower) + lower))
    made: Tensor = x * noise
    return x.copy_(made) if func._schema.is_mutable and func._schema.name.endswith("_") else made


# each takes the pattern, the operation's first argument, and all of them by name


def _between(u: Tensor, x: Any, given: Mapping[str, Any]) -> Any:
    low = given.get("from", 0.0)
    return u * (given.get("to", 1.0) - low) + low


def _centred(u: Tensor, x: Any, given: Mapping[str, Any]) -> Any:
    return (u * 2 - 1) * given.get("std", 1.0) + given.get("mean", 0.0)


def _whole(u: Tensor, x: Any, given: Mapping[str, Any]) -> Any:
    low = given.get("low", given.get("from", 0))
    # without a bound; every integer dtype holds 0 and 1
    high = given.get("high", given.get("to", low + 2))
    return (u * (high - low)).floor() + low


def _tried(u: Tensor, x: Any, given: Mapping[str, Any]) -> Any:
    u = u.to(x.dtype) if x.is_floating_point() else u
    return (torch.log1p(-u) / math.log1p(-given["p"])).ceil().clamp(1)


def _heaviest(u: Tensor, x: Any, given: Mapping[str, Any]) -> Any:
    order: Tensor = x.argsort(stable=True, dim=-1, descending=True)
    count = given.get("num_samples", given.get("count"))
    return order[..., torch.arange(count, device=order.device) % order.shape[-1]]


def _reversed(u: Tensor, x: Any, given: Mapping[str, Any]) -> Any:
    return torch.arange(u.numel() - 1, -1, -1, device=u.device)


_DRAWS: dict[str, Callable[[Tensor, Any, Mapping[str, Any]], Any]] = {
    "bernoulli": lambda u, x, given: u < given.get("p", x),
    "uniform": _between,
    "rand": _between,
    "rand_like": _between,
    "normal": _centred,
    "normal_functional": _centred,
    "randn": _centred,
    "randn_like": _centred,
    "log_normal": lambda u, x, given: _centred(u, x, given).exp(),
    "exponential": lambda u, x, given: -torch.log1p(-u) / given.get("lambd", 1.0),
    "cauchy": lambda u, x, given: ((u - 0.5) * math.pi).tan() * given["sigma"] + given["median"],
    "geometric": _tried,
    "poisson": lambda u, x, given: (u * 2 * x).floor(),
    "_standard_gamma": lambda u, x, given: (u + 0.5) * x,
    "gamma": lambda u, x, given: (u + 0.5) * x,
    "multinomial": _heaviest,
    "random": _whole,
    "randint": _whole,
    "randint_like": _whole,
    "integers": _whole,
    "randperm": _reversed,
    "permutation": _reversed,
}
