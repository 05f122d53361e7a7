"""Fixed draws: two runs of a model, as it is and as a plan, that can be compared.

Inside ``FixedDraws`` the model's own random operations and the seeded ones draw equal numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe import random
from fxpipe.torchtools.draws import Draws


def pattern(like: Tensor) -> Tensor:
    """Numbers in [0, 1) that depend on the position only: the fractions of multiples of φ."""
    places = torch.arange(like.numel(), dtype=torch.float64, device=like.device)
    return ((places + 1) * 0.6180339887498949).frac().reshape(like.shape)


class FixedDraws(Draws):
    """Inside, every random operation draws from a generator with one fixed seed.

    Dropout has no generator. Its masks, and whatever else is zero or one by chance, come from the
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
        if name == "bernoulli":
            chance = random.arguments_of(func, args, kwargs).get("p", args[0])
            return func(*args, **kwargs).copy_(pattern(args[0]) < chance)
        if seeded:
            return func(*args[:-2], torch.tensor(0), 0, **kwargs)
        if (drawing := random.with_generator(func)) is None:
            return func(*args, **kwargs)
        device = args[0].device if args and isinstance(args[0], Tensor) else "cpu"
        generator = torch.Generator(device).manual_seed(random.mix(0, 0))
        return drawing(*random.with_defaults(func, args), **{**kwargs, "generator": generator})
