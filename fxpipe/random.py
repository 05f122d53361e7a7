"""Random operations as pure functions of a seed and a node number.

PyTorch draws from one generator a device, so what an operation gets depends on what ran before
it. Here each draw has a generator of its own, seeded with (micro-batch seed, node): the numbers
are the same for any number of devices, any cuts, any schedule and any recomputation.

The functions take ``seed``, an int64 tensor without dimensions on the CPU, and ``node``, the
number of the operation in the model's graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fxpipe", "DEF")
_LIBRARY.define("bernoulli(Tensor like, float p, Tensor seed, int node) -> Tensor")
_LIBRARY.define("uniform(Tensor like, Tensor seed, int node) -> Tensor")
_LIBRARY.define("normal(Tensor like, Tensor seed, int node) -> Tensor")
_LIBRARY.define("integers(Tensor like, int low, int high, Tensor seed, int node) -> Tensor")
_LIBRARY.define("permutation(Tensor like, Tensor seed, int node) -> Tensor")

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A well-spread 63-bit number from some numbers (the finaliser of splitmix64, chained)."""
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


def _integers(like: Tensor, low: int, high: int, seed: Tensor, node: int) -> Tensor:
    return torch.empty_like(like).random_(low, high, generator=_generator(like, seed, node))


def _permutation(like: Tensor, seed: Tensor, node: int) -> Tensor:
    generator = _generator(like, seed, node)
    return torch.randperm(like.numel(), dtype=like.dtype, device=like.device, generator=generator)


for _name, _run in (
    ("bernoulli", _bernoulli),
    ("uniform", _uniform),
    ("normal", _normal),
    ("integers", _integers),
    ("permutation", _permutation),
):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _key)
_LIBRARY.impl("bernoulli", lambda like, p, s, n: torch.empty_like(like, dtype=torch.bool), "Meta")
_LIBRARY.impl("uniform", lambda like, s, n: torch.empty_like(like), "Meta")
_LIBRARY.impl("normal", lambda like, s, n: torch.empty_like(like), "Meta")
_LIBRARY.impl("integers", lambda like, low, high, s, n: torch.empty_like(like), "Meta")
_LIBRARY.impl("permutation", lambda like, s, n: torch.empty_like(like), "Meta")


def native_dropout(
    x: Tensor, p: float, train: bool | None, seed: Tensor, node: int
) -> tuple[Tensor, Tensor]:
    """Dropout and its mask of what is kept, as ``aten.native_dropout``."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.ops.fxpipe.bernoulli(x.detach(), 1 - p, seed, node)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def bernoulli(p: Tensor, seed: Tensor, node: int) -> Tensor:
    """Ones with the probabilities in a tensor, as ``aten.bernoulli``."""
    like = p.detach()
    drawn: Tensor = torch.ops.fxpipe.uniform(like, seed, node)
    return (drawn < like).to(p.dtype)


def bernoulli_p(x: Tensor, p: float, seed: Tensor, node: int) -> Tensor:
    """Ones with one probability, in the shape and type of ``x``, as ``aten.bernoulli.p``."""
    mask: Tensor = torch.ops.fxpipe.bernoulli(x.detach(), p, seed, node)
    return mask.to(x.dtype)


def rand_like(x: Tensor, seed: Tensor, node: int, **options: Any) -> Tensor:
    """Uniform numbers in [0, 1) in the shape of ``x``."""
    return _as(torch.ops.fxpipe.uniform, x, seed, node, options)


def randn_like(x: Tensor, seed: Tensor, node: int, **options: Any) -> Tensor:
    """Standard normal numbers in the shape of ``x``."""
    return _as(torch.ops.fxpipe.normal, x, seed, node, options)


def rand(size: Sequence[int], seed: Tensor, node: int, **options: Any) -> Tensor:
    """Uniform numbers in [0, 1)."""
    out: Tensor = torch.ops.fxpipe.uniform(torch.empty(size, **options), seed, node)
    return out


def randn(size: Sequence[int], seed: Tensor, node: int, **options: Any) -> Tensor:
    """Standard normal numbers."""
    out: Tensor = torch.ops.fxpipe.normal(torch.empty(size, **options), seed, node)
    return out


def randint(high: int, size: Sequence[int], seed: Tensor, node: int, **options: Any) -> Tensor:
    """Integers in [0, high)."""
    return randint_low(0, high, size, seed, node, **options)


def randint_low(
    low: int, high: int, size: Sequence[int], seed: Tensor, node: int, **options: Any
) -> Tensor:
    """Integers in [low, high)."""
    like = torch.empty(size, **{"dtype": torch.int64, **options})
    out: Tensor = torch.ops.fxpipe.integers(like, low, high, seed, node)
    return out


def randperm(n: int, seed: Tensor, node: int, **options: Any) -> Tensor:
    """A permutation of 0 … n−1."""
    like = torch.empty(n, **{"dtype": torch.int64, **options})
    out: Tensor = torch.ops.fxpipe.permutation(like, seed, node)
    return out


def _as(draw: Any, x: Tensor, seed: Tensor, node: int, options: dict[str, Any]) -> Tensor:
    out: Tensor = draw(torch.empty_like(x.detach(), **options), seed, node)
    return out


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    seed: Tensor,
    node: int,
) -> Tensor:
    """Scaled dot-product attention with dropout of its weights (Vaswani et al., 1706.03762).

    The plain formula: fused kernels draw their masks where no seed can be given.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * (scale or 1 / math.sqrt(query.size(-1)))
    if is_causal:
        shape = scores.shape[-2:]
        causal = torch.ones(shape, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, -math.inf)
    if mask is not None:
        keep = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if keep else scores + mask
    return native_dropout(scores.softmax(-1), p, True, seed, node)[0] @ value
