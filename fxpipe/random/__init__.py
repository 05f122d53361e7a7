"""Random operations as pure functions of a seed and a node number.

PyTorch draws from one generator per device, so the numbers that an operation gets depend on what
ran before it. Here each call has a generator that is seeded with (micro-batch seed, node), so the
numbers are the same for any number of devices, any cuts, any schedule and any recomputation.

All take ``seed``, an int64 tensor without dimensions on the CPU, and ``node``, the number of the
operation in the model's graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
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


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _gamma_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient * torch._standard_gamma_grad(*ctx.saved_tensors), None, None


_OPERATIONS = (
    (
        "bernoulli(Tensor like, float p, Tensor seed, int node) -> Tensor",
        lambda like, p, seed, node: torch.empty_like(like, dtype=torch.bool).bernoulli_(
            p, generator=_generator(like, seed, node)
        ),
        lambda like, *_: torch.empty_like(like, dtype=torch.bool),
    ),
    (
        "uniform(Tensor like, Tensor seed, int node) -> Tensor",
        lambda like, *of: torch.empty_like(like).uniform_(generator=_generator(like, *of)),
    ),
    (
        "normal(Tensor like, Tensor seed, int node) -> Tensor",
        lambda like, *of: torch.empty_like(like).normal_(generator=_generator(like, *of)),
    ),
    (
        "integers(Tensor like, int low, int? high, Tensor seed, int node) -> Tensor",
        lambda like, low, high, *of: torch.empty_like(like).random_(
            low, high, generator=_generator(like, *of)
        ),
    ),
    (
        "permutation(Tensor like, Tensor seed, int node) -> Tensor",
        lambda like, *of: torch.randperm(
            like.numel(), dtype=like.dtype, device=like.device, generator=_generator(like, *of)
        ),
    ),
    (
        "poisson(Tensor rates, Tensor seed, int node) -> Tensor",
        lambda rates, *of: torch.poisson(rates, _generator(rates, *of)),
    ),
    (
        "gamma(Tensor shapes, Tensor seed, int node) -> Tensor",
        lambda shapes, *of: torch._standard_gamma(shapes, _generator(shapes, *of)),
    ),
    (
        "multinomial(Tensor weights, int count, bool again, Tensor seed, int node) -> Tensor",
        lambda weights, count, again, *of: torch.multinomial(
            weights, count, again, generator=_generator(weights, *of)
        ),
        lambda weights, count, *_: weights.new_empty(
            (*weights.shape[:-1], count), dtype=torch.int64
        ),
    ),
)
"""An operator's signature, what it does, and what it makes without data, if not a tensor like its
first operand."""

_LIBRARY = torch.library.Library("fxpipe", "DEF")
for _signature, _run, *_shape in _OPERATIONS:
    _name = _LIBRARY.define(_signature)
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _key)
    _LIBRARY.impl(_name, _shape[0] if _shape else lambda like, *_: torch.empty_like(like), "Meta")
torch.library.register_autograd("fxpipe::gamma", _gamma_backward, setup_context=_keep, lib=_LIBRARY)

OPERATORS = torch.ops.fxpipe


def native_dropout(
    x: Tensor, p: float, train: bool | None, seed: Tensor, node: int
) -> tuple[Tensor, Tensor]:
    """Dropout and its mask of what is kept, as ``aten.native_dropout``."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = OPERATORS.bernoulli(x.detach(), 1 - p, seed, node)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def bernoulli(p: Tensor, seed: Tensor, node: int) -> Tensor:
    """Ones with the probabilities in a tensor, as ``aten.bernoulli``."""
    return bernoulli_like(p, p, seed, node)


def bernoulli_p(x: Tensor, p: float, seed: Tensor, node: int) -> Tensor:
    """Ones with one probability, in the shape and type of ``x``, as ``aten.bernoulli.p``."""
    return _draw(OPERATORS.bernoulli, x.detach(), p, seed, node).to(x.dtype)


def bernoulli_like(x: Tensor, p: Tensor, seed: Tensor, node: int) -> Tensor:
    """Ones with the probabilities in ``p``, in the shape of ``x``, as ``Tensor.bernoulli_``.

    As in torch, the numbers that are compared have float32 at least: of 256 numbers in bfloat16 one
    is below any small probability.
    """
    drawn = rand_like(x, seed, node, dtype=torch.promote_types(p.dtype, torch.float32))
    return (drawn < p.detach()).to(x.dtype)


def rand_like(x: Tensor, seed: Tensor, node: int, **options: Any) -> Tensor:
    """Uniform numbers in [0, 1) in the shape of ``x``."""
    return _draw(OPERATORS.uniform, torch.empty_like(x.detach(), **options), seed, node)


def randn_like(x: Tensor, seed: Tensor, node: int, **options: Any) -> Tensor:
    """Standard normal numbers in the shape of ``x``."""
    return _draw(OPERATORS.normal, torch.empty_like(x.detach(), **options), seed, node)


def rand(size: Sequence[int], seed: Tensor, node: int, **options: Any) -> Tensor:
    """Uniform numbers in [0, 1)."""
    return _draw(OPERATORS.uniform, torch.empty(size, **options), seed, node)


def randn(size: Sequence[int], seed: Tensor, node: int, **options: Any) -> Tensor:
    """Standard normal numbers."""
    return _draw(OPERATORS.normal, torch.empty(size, **options), seed, node)


def randint(high: int, size: Sequence[int], seed: Tensor, node: int, **options: Any) -> Tensor:
    """Integers in [0, high)."""
    return randint_low(0, high, size, seed, node, **options)


def randint_low(
    low: int, high: int, size: Sequence[int], seed: Tensor, node: int, **options: Any
) -> Tensor:
    """Integers in [low, high)."""
    like = torch.empty(size, **{"dtype": torch.int64, **options})
    return _draw(OPERATORS.integers, like, low, high, seed, node)


def normal(
    mean: Tensor | float, std: Tensor | float, seed: Tensor, node: int, **options: Any
) -> Tensor:
    """Normal numbers with a mean and a deviation for each, as ``aten.normal``."""
    mean, std = (x.detach() if isinstance(x, Tensor) else x for x in (mean, std))
    like, *_ = torch.broadcast_tensors(*(x for x in (mean, std) if isinstance(x, Tensor)))
    return randn_like(like, seed, node, memory_format=torch.contiguous_format) * std + mean


def normal_of_size(
    mean: float, std: float, size: Sequence[int], seed: Tensor, node: int, **options: Any
) -> Tensor:
    """Normal numbers with one mean and deviation."""
    return randn(size, seed, node, **options) * std + mean


def normal_like(x: Tensor, mean: float, std: float, seed: Tensor, node: int) -> Tensor:
    """Normal numbers in the shape of ``x``, as ``Tensor.normal_``."""
    return randn_like(x, seed, node) * std + mean


def uniform_like(x: Tensor, low: float, high: float, seed: Tensor, node: int) -> Tensor:
    """Uniform numbers in [low, high) in the shape of ``x``, as ``Tensor.uniform_``."""
    return rand_like(x, seed, node) * (high - low) + low


def exponential_like(x: Tensor, rate: float, seed: Tensor, node: int) -> Tensor:
    """Exponentially distributed numbers in the shape of ``x``, as ``Tensor.exponential_``.

    They are never 0, so that their logarithms, as in ``gumbel_softmax``, are finite.
    """
    drawn, kind = -torch.log1p(-_fine(x, seed, node)) / rate, torch.finfo(x.dtype)
    return drawn.clamp_min(kind.tiny * kind.eps).to(x.dtype)


def log_normal_like(x: Tensor, mean: float, std: float, seed: Tensor, node: int) -> Tensor:
    """Numbers whose logarithm is normal, in the shape of ``x``, as ``Tensor.log_normal_``."""
    return normal_like(x, mean, std, seed, node).exp()


def cauchy_like(x: Tensor, median: float, sigma: float, seed: Tensor, node: int) -> Tensor:
    """Numbers of Cauchy's distribution in the shape of ``x``, as ``Tensor.cauchy_``."""
    return (((_fine(x, seed, node) - 0.5) * math.pi).tan() * sigma + median).to(x.dtype)


def geometric_like(x: Tensor, p: float, seed: Tensor, node: int) -> Tensor:
    """Geometrically distributed numbers in the shape of ``x``, as ``Tensor.geometric_``."""
    tries = torch.log1p(-_fine(x, seed, node)) / math.log1p(-p)
    return tries.ceil().clamp_min(1).to(x.dtype)


def integers_like(x: Tensor, seed: Tensor, node: int) -> Tensor:
    """Integers over the whole range of the dtype of ``x``, as ``Tensor.random_``."""
    return _draw(OPERATORS.integers, torch.empty_like(x), 0, None, seed, node)


def randint_like(x: Tensor, high: int, seed: Tensor, node: int, **options: Any) -> Tensor:
    """Integers in [0, high) in the shape of ``x``."""
    return randint_low_like(x, 0, high, seed, node, **options)


def randint_low_like(
    x: Tensor, low: int, high: int, seed: Tensor, node: int, **options: Any
) -> Tensor:
    """Integers in [low, high) in the shape of ``x``."""
    like = torch.empty_like(x.detach(), **options)
    return _draw(OPERATORS.integers, like, low, high, seed, node)


def randint_below_like(x: Tensor, high: Tensor, seed: Tensor, node: int, **options: Any) -> Tensor:
    """Integers in [0, high), with ``high`` a tensor of one number, in the shape of ``x``."""
    out = torch.empty_like(x, **options)
    return (_fine(x, seed, node) * high).floor().to(out.dtype)


def randperm(n: int, seed: Tensor, node: int, **options: Any) -> Tensor:
    """A permutation of 0 … n−1."""
    like = torch.empty(n, **{"dtype": torch.int64, **options})
    return _draw(OPERATORS.permutation, like, seed, node)


def multinomial(weights: Tensor, count: int, replacement: bool, seed: Tensor, node: int) -> Tensor:
    """Indices drawn with the weights of each row, as ``torch.multinomial``."""
    return _draw(OPERATORS.multinomial, weights.detach(), count, replacement, seed, node)


def poisson(rates: Tensor, seed: Tensor, node: int) -> Tensor:
    """Counts of Poisson's distribution with the rates in a tensor, as ``torch.poisson``."""
    return _draw(OPERATORS.poisson, rates.detach(), seed, node)


def standard_gamma(shapes: Tensor, seed: Tensor, node: int) -> Tensor:
    """Numbers of the gamma distribution, whose gradient is that of ``torch.distributions``."""
    return _draw(OPERATORS.gamma, shapes, seed, node)


def rrelu(x: Tensor, lower: float, upper: float, training: bool, seed: Tensor, node: int) -> Tensor:
    """A leaky ReLU whose slopes are uniform in [lower, upper) (Xu et al., 1505.00853)."""
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    return x * torch.where(x.detach() > 0, 1.0, uniform_like(x, lower, upper, seed, node))


def rrelu_with_noise(
    x: Tensor,
    noise: Tensor,
    lower: float,
    upper: float,
    training: bool,
    seed: Tensor,
    node: int,
) -> tuple[Tensor, Tensor]:
    """``rrelu`` and its slopes, as ``aten.rrelu_with_noise_functional``; ``noise`` is not read."""
    return rrelu(x, lower, upper, training, seed, node), noise


def _fine(x: Tensor, seed: Tensor, node: int) -> Tensor:
    """Uniform numbers in [0, 1) in float64, as torch's own operations take them to compute others:
    those of a narrower type are so few that a distribution's tail would be missing."""
    return rand_like(x, seed, node, dtype=torch.float64)


def _draw(operator: Any, *args: Any) -> Tensor:
    drawn: Tensor = operator(*args)
    return drawn


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

    The plain formula: fused kernels draw their masks where no seed can be given. As in torch, what
    sees no key at all gets zeros.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    # scaled first, as scores before that may be too large for float16
    scores = query * (scale or 1 / math.sqrt(query.size(-1))) @ key.transpose(-2, -1)
    if is_causal:
        shape = scores.shape[-2:]
        causal = torch.ones(shape, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, -math.inf)
    if mask is not None:
        keep = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if keep else scores + mask
    weights = scores.softmax(-1) if mask is None else aten._safe_softmax(scores, -1)
    return native_dropout(weights, p, True, seed, node)[0] @ value


SEEDED: Mapping[Any, Callable[..., Any]] = {
    aten.native_dropout.default: native_dropout,
    aten.bernoulli.default: bernoulli,
    aten.bernoulli.p: bernoulli_p,
    aten.bernoulli.Tensor: bernoulli_like,
    aten.rand_like.default: rand_like,
    aten.randn_like.default: randn_like,
    aten.rand.default: rand,
    aten.randn.default: randn,
    aten.randint.default: randint,
    aten.randint.low: randint_low,
    aten.randperm.default: randperm,
    aten.normal.Tensor_Tensor: normal,
    aten.normal.Tensor_float: normal,
    aten.normal.float_Tensor: normal,
    aten.normal.float_float: normal_of_size,
    aten.normal_functional.default: normal_like,
    aten.uniform.default: uniform_like,
    aten.exponential.default: exponential_like,
    aten.randint_like.default: randint_like,
    aten.randint_like.low_dtype: randint_low_like,
    aten.randint_like.Tensor: randint_below_like,
    aten.random.default: integers_like,
    aten.random.to: randint_like,
    aten.log_normal.default: log_normal_like,
    aten.cauchy.default: cauchy_like,
    aten.geometric.default: geometric_like,
    aten.multinomial.default: multinomial,
    aten.poisson.default: poisson,
    aten._standard_gamma.default: standard_gamma,
    aten.rrelu.default: rrelu,
    aten.rrelu_with_noise_functional.default: rrelu_with_noise,
}
"""Random operation → its form with a seed and a node number, which come before the options."""

UNSEEDED = ("pin_memory", "layout", "generator")
"""Options of random operations that the seeded forms do not take."""


def with_defaults(function: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """The positional arguments of an operation, with the defaults of those that were left out.

    A generator argument is dropped, as a seeded form has its own.
    """
    arguments = [a for a in function._schema.arguments if not a.kwarg_only]
    rest = [a.default_value for a in arguments[len(args) :] if a.has_default_value()]
    given = zip(arguments, (*args, *rest), strict=False)
    return tuple(value for a, value in given if a.name != "generator")


def draws(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a random operation draws numbers: not with dropout 0 or in eval mode."""
    given = arguments_of(function, args, kwargs)
    chances = [given[name] for name in ("p", "dropout", "dropout_p") if name in given]
    drawn = not chances or any(not isinstance(chance, int | float) or chance for chance in chances)
    return drawn and in_training(function, args, kwargs)


def in_training(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a random operation is not in eval mode."""
    given = arguments_of(function, args, kwargs)
    return False not in (given.get("train"), given.get("training"))


def arguments_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation's call by name, in the order of its schema, with the defaults
    of those that were left out."""
    given = dict(zip((a.name for a in function._schema.arguments), args, strict=False)) | {**kwargs}
    return {a.name: given.get(a.name, a.default_value) for a in function._schema.arguments}
