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

from fxpipe.random import with_defaults
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
        if name == "rrelu_with_noise" and _given(func, args, kwargs, "training"):
            return _sloped(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace == "fxpipe":
            draw = _DRAWS.get(name)
            if draw is not None:
                out = func(*args, **kwargs)
                numbers = draw(pattern(out), func, args, kwargs)
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


def _given(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            if place < len(args):
                return args[place]
            return kwargs.get(name, argument.default_value)
    return None


def _less(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    chance = _given(func, args, kwargs, "p")
    chances: Tensor | float = args[0].detach() if chance is None else chance
    return numbers < chances


def _between(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    low = _given(func, args, kwargs, "from") or 0.0
    high = _given(func, args, kwargs, "to")
    return numbers * ((1.0 if high is None else high) - low) + low


def _centred(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    mean, std = _given(func, args, kwargs, "mean"), _given(func, args, kwargs, "std")
    mean, std = (x.detach() if isinstance(x, Tensor) else x for x in (mean, std))
    return (numbers * 2 - 1) * (1.0 if std is None else std) + (0.0 if mean is None else mean)


def _waited(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    waited: Tensor = -torch.log1p(-numbers) / (_given(func, args, kwargs, "lambd") or 1.0)
    return waited


def _exponential_of(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    return _centred(numbers, func, args, kwargs).exp()


def _turned(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    median, sigma = _given(func, args, kwargs, "median"), _given(func, args, kwargs, "sigma")
    turned: Tensor = ((numbers - 0.5) * math.pi).tan() * sigma + median
    return turned


def _tried(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    if args[0].is_floating_point():
        numbers = numbers.to(args[0].dtype)
    return (torch.log1p(-numbers) / math.log1p(-_given(func, args, kwargs, "p"))).ceil().clamp(1)


def _counted(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    counted: Tensor = (numbers * 2 * args[0].detach()).floor()
    return counted


def _scaled(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    scaled: Tensor = (numbers + 0.5) * args[0].detach()
    return scaled


def _heaviest(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    order = args[0].detach().argsort(stable=True, dim=-1, descending=True)
    place = torch.arange(args[1], device=order.device) % order.shape[-1]
    heaviest: Tensor = order[..., place]
    return heaviest


def _sloped(func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    """``rrelu_with_noise``: its second argument receives the slopes, for the backward."""
    x, noise, lower, upper = (
        _given(func, args, kwargs, name) for name in ("self", "noise", "lower", "upper")
    )
    noise.copy_(torch.where(x > 0, 1.0, pattern(x) * (upper - lower) + lower))
    made: Tensor = x * noise
    return x.copy_(made) if func._schema.is_mutable and func._schema.name.endswith("_") else made


def _whole(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    low = _given(func, args, kwargs, "low") or _given(func, args, kwargs, "from") or 0
    high = _given(func, args, kwargs, "high")
    high = _given(func, args, kwargs, "to") if high is None else high
    high = low + 2 if high is None else high  # without a bound; every integer dtype holds 0 and 1
    whole: Tensor = (numbers * (high - low)).floor() + low
    return whole


def _reversed(numbers: Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    return torch.arange(numbers.numel() - 1, -1, -1, device=numbers.device)


_DRAWS: dict[str, Callable[..., Tensor]] = {
    "bernoulli": _less,
    "uniform": _between,
    "rand": _between,
    "rand_like": _between,
    "normal": _centred,
    "normal_functional": _centred,
    "exponential": _waited,
    "randn": _centred,
    "randn_like": _centred,
    "randint": _whole,
    "randint_like": _whole,
    "integers": _whole,
    "randperm": _reversed,
    "permutation": _reversed,
    "random": _whole,
    "log_normal": _exponential_of,
    "cauchy": _turned,
    "geometric": _tried,
    "poisson": _counted,
    "_standard_gamma": _scaled,
    "gamma": _scaled,
    "multinomial": _heaviest,
}
