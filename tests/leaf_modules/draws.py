"""A plain loop whose modules draw what leaf modules do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fxpipe.compiler.leaf_modules.draws import SeededDraws
from fxpipe.random import mix


@contextmanager
def seeded(leaves: Sequence[nn.Module], step: int, microbatches: int) -> Iterator[None]:
    """Inside, the leaves draw in the plain loop what they do in a step of the pipeline."""
    torch.manual_seed(step)
    seed, draws = int(torch.randint(2**62, (), dtype=torch.int64)), SeededDraws(0, 0)

    def seed_at(leaf: nn.Module, number: int) -> Any:
        rest = iter(range(microbatches))

        def begin(module: nn.Module, args: Any) -> None:
            draws.seed, draws.node, draws.drawn = mix(seed, next(rest)), number, 0

        return leaf.register_forward_pre_hook(begin)

    hooks = [seed_at(leaf, number) for number, leaf in enumerate(leaves)]
    with draws:
        yield
    for hook in hooks:
        hook.remove()
