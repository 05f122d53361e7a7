"""Random numbers of leaf modules as functions of a seed.

A module draws from PyTorch's global generator, whose state depends on what ran before, and in
which thread. Inside ``SeededDraws`` each draw has a generator of its own, seeded with the
micro-batch's seed, the number of the module's node in the model's graph, and the number of earlier
draws in that node. So the numbers are the same for any number of devices, any cuts, any schedule
and any recomputation.
"""

from __future__ import annotations

from typing import Any

import torch

from fxpipe.errors import InputError
from fxpipe.random import SEEDED, UNSEEDED, draws, mix, with_defaults
from fxpipe.torchtools.draws import Draws


class SeededDraws(Draws):
    """A mode in which the seed of a micro-batch and the number of a node determine the random
    numbers of a leaf module."""

    def __init__(self, seed: int, node: int) -> None:
        super().__init__()
        self.seed, self.node, self.drawn = seed, node, 0

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        number = mix(self.node, self.drawn)
        self.drawn += 1
        if func in SEEDED:
            seed = torch.tensor(self.seed)
            options = {k: v for k, v in kwargs.items() if k not in UNSEEDED}
            return SEEDED[func](*with_defaults(func, args), seed, number, **options)
        if any(argument.name == "generator" for argument in func._schema.arguments):
            device = args[0].device if args and isinstance(args[0], torch.Tensor) else "cpu"
            generator = torch.Generator(device).manual_seed(mix(self.seed, number))
            return func(*with_defaults(func, args), **{**kwargs, "generator": generator})
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        raise InputError(
            f"a module draws random numbers with {func}, which cannot be seeded for each draw; "
            "draw with torch.rand or torch.randn instead"
        )


class DrawsWatched(Draws):
    """A mode that notes in ``drew`` whether any random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and draws(func, args, kwargs):
            self.drew = True
        return func(*args, **kwargs)
