"""Fixed draws: two runs of a model, as it is and as a plan, that can be compared.

Inside ``FixedDraws`` the model's own random operations and the seeded ones draw equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe import random
from fxpipe.extensions.draws import Draws


def pattern(like: Tensor) -> Tensor:
    """Numbers in [0, 1) that depend on the position only: the fractions of multiples of φ."""
    places = torch.arange(like.numel(), dtype=torch.float64, device=like.device)
    return ((places + 1) * 0.6180339887498949).frac().reshape(like.shape)


class FixedDraws(Draws):
    """Inside, every random operation draws from a generator with one fixed seed.

    Operations whose draws depend on values, which two runs may round differently, draw from the
    fixed ``pattern`` instead.
    """

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation with fixed draws."""
        name = func._schema.name.partition("::")[2].rstrip("_")
        if name == "native_dropout" and args[2] is not False and 0 < args[1] < 1:
            mask = pattern(args[0]) < 1 - args[1]
            return args[0] * mask * (1 / (1 - args[1])), mask
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


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operation that are not None, by name."""
    arguments = random.arguments_of(func, args, kwargs)
    return {name: value for name, value in arguments.items() if value is not None}


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
"""Operation → its draws, given the pattern, its first argument, and all arguments by name."""
