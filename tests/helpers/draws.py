"""Models that draw random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from fxpipe.random import mix
from fxpipe.random.leaf_draws import SeededDraws, draw_from
from tests.helpers.fronted import front_end, run_graph


class Draws(nn.Module):
    """Any function of the input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def drawn(function: Callable[[Tensor], Any], x: Tensor, seed: int = 0) -> Any:
    """What a function makes of a tensor, as the front end compiles it, with a seed."""
    model = Draws(function)
    return run_graph(model, front_end(model, x), x, seed=seed)[0]


@contextmanager
def seeded(leaves: Sequence[nn.Module], step: int, microbatches: int) -> Iterator[None]:
    """Inside, the leaves draw in the plain loop what they do in a step of the pipeline."""
    torch.manual_seed(step)
    seed = int(torch.randint(2**62, (), dtype=torch.int64))

    def seed_at(leaf: nn.Module, number: int) -> Any:
        rest = iter(range(microbatches))

        def begin(module: nn.Module, args: Any) -> None:
            of_microbatch = mix(seed, next(rest))
            draw_from(None, torch.tensor(of_microbatch), number)  # PyTorch's
            own = mix(of_microbatch, number)
            random.seed(own)
            numpy.random.seed([own // 2**32, own % 2**32])

        return leaf.register_forward_pre_hook(begin)

    hooks = [seed_at(leaf, number) for number, leaf in enumerate(leaves)]
    with SeededDraws():
        yield
    for hook in hooks:
        hook.remove()
