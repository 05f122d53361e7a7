"""Operators that draw random numbers, each call from a generator of its own.

PyTorch draws from one generator per device, so the numbers that an operation gets depend on what
ran before it. Here each call has a generator that is seeded with (micro-batch seed, node), so the
numbers are the same for any number of devices, any cuts, any schedule and any recomputation.

They take ``seed``, an int64 tensor without dimensions on the CPU, and ``node``, the number of the
operation in the model's graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fxpipe", "DEF")
_LIBRARY.define("bernoulli(Tensor like, float p, Tensor seed, int node) -> Tensor")
_LIBRARY.define("uniform(Tensor like, Tensor seed, int node) -> Tensor")
_LIBRARY.define("normal(Tensor like, Tensor seed, int node) -> Tensor")
_LIBRARY.define("integers(Tensor like, int low, int? high, Tensor seed, int node) -> Tensor")
_LIBRARY.define("permutation(Tensor like, Tensor seed, int node) -> Tensor")
_LIBRARY.define("poisson(Tensor rates, Tensor seed, int node) -> Tensor")
_LIBRARY.define("gamma(Tensor shapes, Tensor seed, int node) -> Tensor")
_LIBRARY.define(
    "multinomial(Tensor weights, int count, bool again, Tensor seed, int node) -> Tensor"
)

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A 63-bit hash of some numbers (the finaliser of splitmix64, chained)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def _generator(like: Tensor, seed: Tensor, node: int) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(mix(int(seed.item()), node))


def _bernoulli(like: Tensor, p: float, seed: Tensor, node: int) -> Tensor:
    out = torch.empty_like(like, dtype=torch.bool)
    return out.bernoulli_(p, generator=_generator(like, seed, node))


def _uniform(like: Tensor, seed: Tensor, node: int) -> Tensor:
    return torch.empty_like(like).uniform_(generator=_generator(like, seed, node))


def _normal(like: Tensor, seed: Tensor, node: int) -> Tensor:
    return torch.empty_like(like).normal_(generator=_generator(like, seed, node))


def _integers(like: Tensor, low: int, high: int | None, seed: Tensor, node: int) -> Tensor:
    return torch.empty_like(like).random_(low, high, generator=_generator(like, seed, node))


def _permutation(like: Tensor, seed: Tensor, node: int) -> Tensor:
    generator = _generator(like, seed, node)
    return torch.randperm(like.numel(), dtype=like.dtype, device=like.device, generator=generator)


def _poisson(rates: Tensor, seed: Tensor, node: int) -> Tensor:
    return torch.poisson(rates, _generator(rates, seed, node))


def _gamma(shapes: Tensor, seed: Tensor, node: int) -> Tensor:
    return torch._standard_gamma(shapes, _generator(shapes, seed, node))


def _multinomial(weights: Tensor, count: int, again: bool, seed: Tensor, node: int) -> Tensor:
    return torch.multinomial(weights, count, again, generator=_generator(weights, seed, node))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _gamma_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient * torch._standard_gamma_grad(*ctx.saved_tensors), None, None


for _name, _run, _shape in (
    ("bernoulli", _bernoulli, lambda like, p, s, n: torch.empty_like(like, dtype=torch.bool)),
    ("uniform", _uniform, lambda like, s, n: torch.empty_like(like)),
    ("normal", _normal, lambda like, s, n: torch.empty_like(like)),
    ("integers", _integers, lambda like, low, high, s, n: torch.empty_like(like)),
    ("permutation", _permutation, lambda like, s, n: torch.empty_like(like)),
    ("poisson", _poisson, lambda rates, s, n: torch.empty_like(rates)),
    ("gamma", _gamma, lambda shapes, s, n: torch.empty_like(shapes)),
    (
        "multinomial",
        _multinomial,
        lambda w, count, again, s, n: w.new_empty((*w.shape[:-1], count), dtype=torch.int64),
    ),
):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _key)
    _LIBRARY.impl(_name, _shape, "Meta")
torch.library.register_autograd("fxpipe::gamma", _gamma_backward, setup_context=_keep, lib=_LIBRARY)

OPERATORS = torch.ops.fxpipe
"""The operators, by name."""
