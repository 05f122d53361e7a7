"""Random operations as pure functions of a seed and a node number.

PyTorch draws from one generator per device, so the numbers that an operation gets depend on what
ran before it. Here each call has a generator that is seeded with (micro-batch seed, node), so the
numbers are the same for any number of devices, any cuts, any schedule and any recomputation.

All seeded operations take ``seed``, an int64 scalar tensor on the CPU, and ``node``, the number of
the operation in the model's graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
_BITS = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hash numbers to 63 bits (the finaliser of splitmix64, chained)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _BITS
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _BITS
        state ^= state >> 31
    return state >> 1


_LIBRARY = torch.library.Library("fxpipe", "DEF")

UNSEEDED = ("pin_memory", "layout", "generator")
"""Options of random operations that the seeded forms do not take."""


def _operator(
    name: str, words: Sequence[str], draw: Callable[..., Tensor], fake: Callable[..., Any]
) -> Any:
    """Define an operator without a gradient that takes operands, a seed and a node number.

    Args:
        name: its name.
        words: its operands and, after ``*``, its options, as in a schema.
        draw: computes the result from operands, options and a generator.
        fake: computes a result without data from operands and options.
    """
    end = words.index("*") if "*" in words else len(words)
    schema = ", ".join((*words[:end], "Tensor seed", "int node", *words[end:]))
    _LIBRARY.define(f"{name}({schema}) -> Tensor")

    @torch.no_grad()
    def run(*args: Any, **options: Any) -> Tensor:
        *operands, seed, node = args
        tensors = [operand for operand in operands if isinstance(operand, Tensor)]
        device = tensors[0].device if tensors else options.get("device")
        generator = torch.Generator(device or "cpu").manual_seed(mix(int(seed.item()), node))
        return draw(*operands, generator=generator, **options)

    @torch.no_grad()
    def run_without_data(*args: Any, **options: Any) -> Any:
        return fake(*args[:-2], **options)

    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"fxpipe::{name}", run_without_data, lib=_LIBRARY)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.fxpipe, packet), overload or "default")


def _seeded(target: OpOverload) -> Any:
    """Define the seeded form of a random operation: the same operation with its own generator."""
    words = str(target._schema).partition("(")[2].rpartition(") -> ")[0].split(", ")
    kept = [word for word in words if word.partition("=")[0].split()[-1] not in UNSEEDED]
    end = kept.index("*") if "*" in kept else len(kept)
    plain = [word.partition("=")[0] for word in kept[:end]]  # without defaults: the seed follows
    options = kept[end:] if kept[end + 1 :] else []
    name = str(target).removeprefix("aten.").removesuffix(".default")
    drawing = with_generator(target)
    assert drawing is not None
    return _operator(name, [*plain, *options], drawing, target)


def with_generator(target: OpOverload) -> OpOverload | None:
    """Return the overload of a random operation that takes a generator; None if there is none."""

    def names(overload: OpOverload) -> list[str]:
        return [argument.name for argument in overload._schema.arguments]

    packet = target.overloadpacket
    overloads = [target, *(getattr(packet, name) for name in packet.overloads())]
    wanted = {*names(target), "generator"}
    return next((overload for overload in overloads if {*names(overload)} == wanted), None)


_MASK = _operator(
    "bernoulli.mask",
    ("Tensor like", "float p"),
    lambda like, p, generator: torch.empty_like(like, dtype=torch.bool).bernoulli_(
        p, generator=generator
    ),
    lambda like, p: torch.empty_like(like, dtype=torch.bool),
)

_OF_LAYOUTS = {
    target: _seeded(target)
    for target in (
        *(aten.rand.default, aten.randn.default, aten.rand_like.default, aten.randn_like.default),
        *(aten.randint.default, aten.randint.low, aten.randperm.default, aten.bernoulli.p),
        *(aten.randint_like.default, aten.randint_like.low_dtype, aten.random.default),
        *(aten.random.to, aten.uniform.default, aten.normal.float_float),
        *(aten.normal_functional.default, aten.log_normal.default, aten.exponential.default),
        *(aten.cauchy.default, aten.geometric.default),
    )
}
_OF_VALUES = {
    target: _seeded(target)
    for target in (
        *(aten.bernoulli.default, aten.bernoulli.Tensor, aten.randint_like.Tensor),
        *(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor),
        *(aten.multinomial.default, aten.poisson.default),
    )
}
LAYOUTS = frozenset((_MASK, *_OF_LAYOUTS.values()))
"""The seeded operators that read no values, and of a tensor argument only its layout."""

OPERATORS = LAYOUTS.union(_OF_VALUES.values())
"""All seeded operators."""

for _operation in OPERATORS:
    _LIBRARY.impl(_operation, torch.library.fallthrough_kernel, "Autograd")

_TWO_BYTES = (torch.bfloat16, torch.float16)
_CAST = (torch.float32, *_TWO_BYTES)


def native_dropout(
    x: Tensor, p: float, train: bool | None, seed: Tensor, node: int
) -> tuple[Tensor, Tensor]:
    """Dropout, as ``aten.native_dropout``. Returns the result, and a mask of the kept values."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = _MASK(x, 1 - p, seed, node)
    return x * mask * _dropout_scale(p, x.dtype, x.device.type), mask


@cache
def _dropout_scale(p: float, dtype: torch.dtype, device: str) -> float:
    """1/(1 - p) as PyTorch's dropout multiplies by it: on the CPU it is rounded to the operand's
    type, in fused kernels it is not."""
    if p == 1 or device != "cpu":
        return 0.0 if p == 1 else 1 / (1 - p)
    with _disable_current_modes():  # a tracer would record this
        return float(torch.ones((), dtype=dtype, device="cpu").div_(1 - p).item())


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

    Computes the plain formula, as fused kernels take no seed for their masks. As in torch, a query
    whose keys are all masked gets zeros, and on the CPU types of two bytes are computed in float32.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # autocast casts the operands, and nothing inside
        low = torch.get_autocast_dtype(kind)
        query, key, value = (x.to(low) if x.dtype in _CAST else x for x in (query, key, value))
        mask = mask.to(low) if mask is not None and mask.dtype in _CAST else mask
        with torch.autocast(kind, enabled=False):
            return attention(query, key, value, mask, p, is_causal, scale, enable_gqa, seed, node)
    dtype = query.dtype
    if kind == "cpu" and dtype in _TWO_BYTES:
        query, key, value = query.float(), key.float(), value.float()
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    # scale before the product, which may overflow in float16 otherwise
    scores = query * (scale or 1 / math.sqrt(query.size(-1))) @ key.transpose(-2, -1)
    if is_causal:
        shape = scores.shape[-2:]
        causal = torch.ones(shape, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, -math.inf)
    if mask is not None:
        keep = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if keep else scores + mask
    weights = scores.softmax(-1) if mask is None else aten._safe_softmax(scores, -1)
    return (native_dropout(weights, p, True, seed, node)[0] @ value).to(dtype)


SEEDED: Mapping[Any, Callable[..., Any]] = {
    **_OF_LAYOUTS,
    **_OF_VALUES,
    aten.native_dropout.default: native_dropout,
}
"""Random operation → its form with a seed and a node number, which come before the options."""


def with_defaults(function: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return an operation's positional arguments, with defaults for those that were left out, and
    without a generator: seeded forms have their own."""
    arguments = [a for a in function._schema.arguments if not a.kwarg_only]
    rest = [a.default_value for a in arguments[len(args) :] if a.has_default_value()]
    pairs = zip(arguments, (*args, *rest), strict=False)
    return tuple(value for a, value in pairs if a.name != "generator")


def draws(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a random operation draws numbers: not with dropout 0 or in eval mode."""
    arguments = arguments_of(function, args, kwargs)
    chances = [arguments[name] for name in ("p", "dropout", "dropout_p") if name in arguments]
    drawn = not chances or any(not isinstance(chance, int | float) or chance for chance in chances)
    return drawn and in_training(function, args, kwargs)


def in_training(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a random operation is not in eval mode."""
    arguments = arguments_of(function, args, kwargs)
    return False not in (arguments.get("train"), arguments.get("training"))


def arguments_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name → value of the arguments of an operation's call, in the order of its schema, with
    defaults for those that were left out."""
    schema = function._schema.arguments
    passed = dict(zip((a.name for a in schema), args, strict=False)) | {**kwargs}
    return {a.name: passed.get(a.name, a.default_value) for a in schema}
