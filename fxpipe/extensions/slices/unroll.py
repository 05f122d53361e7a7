"""Run a model once for each slice of its sequences, for its trace.

before:  y = model(x)                                     x: (batch, 8, …)
after:   y0 = model(x[:, :4]);  y1 = model(x[:, 4:])      y = cat([y0, y1], 1)

The second run attends to the keys and values of the first as well: those are in the model's own
cache, or, where it has none, each causal ``scaled_dot_product_attention`` of a slice gets those of
all slices before it. It reads the weights through the first, so that the gradients of all later
slices come back as one:

before:  y1 = linear(x1, w)                                gradients of w: from y0, from y1, …
after:   w1 = alias(w);  y1 = linear(x1, w1)               from y0, and from w1
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxpipe.errors import InputError
from fxpipe.passes.tracing.loss_module import LossModule

Cache = Callable[[], Any]
"""Makes an empty cache of keys and values, which a model takes as ``past_key_values=``."""

_NOT_CAUSAL = (
    "slices need causal attention, and the model calls scaled_dot_product_attention with {}; call "
    "it with is_causal=True and no mask, give Slices(cache=...) for a model that has a cache, or "
    "take a schedule without slices"
)


def in_slices(model: nn.Module, slices: int, dim: int, cache: Cache | None) -> nn.Module:
    """A model over the same parameters whose ``forward`` runs slice after slice.

    A loss, and a model in eval mode, which may be called for sequences of any length, come back
    as they are.
    """
    if isinstance(model, LossModule) or not model.training:
        return model
    unrolled, whole = copy.copy(model), model.forward

    @functools.wraps(whole)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _chained(model) as begin:
            return _in_slices(whole, slices, dim, cache, begin, args, kwargs)

    unrolled.forward = forward
    return unrolled


def _in_slices(
    forward: Callable[..., Any],
    slices: int,
    dim: int,
    cache: Cache | None,
    begin: Callable[[], None],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    lengths = [x.shape[dim] for x in leaves if isinstance(x, Tensor) and x.ndim > dim]
    if not lengths:
        raise InputError(
            f"slices: no input of the model has a dimension {dim}; name the sequence's"
        )
    length = lengths[0]
    if length % slices:
        raise InputError(
            f"sequences of {length} cannot be cut into {slices} equal slices; pad them, or take "
            "another number of slices"
        )
    part = length // slices

    def cut(start: int, size: int, given: Any) -> Any:
        def of(x: Tensor) -> Tensor:
            return x.narrow(dim, start, size) if x.ndim > dim and x.shape[dim] == length else x

        return pytree.tree_map_only(Tensor, of, given)

    seen: dict[int, tuple[Tensor, Tensor]] = {}
    held = {} if cache is None else {"past_key_values": cache(), "use_cache": True}
    results = []
    for start in range(0, length, part):
        own, named = cut(start, part, (args, dict(kwargs)))
        begin()
        if cache is not None and "attention_mask" in kwargs:  # also says which keys are padding
            named["attention_mask"] = cut(0, start + part, kwargs["attention_mask"])
        with nullcontext() if cache else _Attention(seen):
            result = forward(*own, **named, **held)
        if cache is not None:
            result.past_key_values = None
        results.append(pytree.tree_flatten(result))
    flat = zip(*(leaves for leaves, _ in results), strict=True)
    joined = [_joined(parts, dim, part) for parts in flat]
    return pytree.tree_unflatten(joined, results[0][1])


@contextmanager
def _chained(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Inside, each call of what this yields but the first lets each module read its weights through
    those that it has read so far. A tied weight, which may be read on several stages, has such a
    chain for each of its names, and but for the first of these from the first call on."""
    held: list[tuple[dict[str, Any], str, Tensor]] = [
        (cast(dict[str, Any], module._parameters), name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]

    seen: set[int] = set()

    def begin() -> None:
        for entries, name, _ in held:
            first = id(entries[name]) not in seen
            seen.add(id(entries[name]))
            if not first:
                entries[name] = torch.ops.aten.alias.default(entries[name])
                seen.add(id(entries[name]))

    try:
        yield begin
    finally:
        for entries, name, parameter in held:
            entries[name] = parameter


def _joined(parts: tuple[Any, ...], dim: int, part: int) -> Any:
    first = parts[0]
    if not isinstance(first, Tensor):
        return first
    if first.ndim <= dim or first.shape[dim] != part:
        raise InputError(
            f"the model returns a tensor of shape {tuple(first.shape)} for a slice of {part}, "
            f"which has no sequence in dimension {dim}; return outputs for each place of the "
            "sequence, and give the loss as compile(..., loss=...)"
        )
    return torch.cat(parts, dim)


class _Attention(TorchFunctionMode):
    """Inside, attention reads the keys and values of earlier slices, which are in ``seen``: number
    of the call in the model → keys and values."""

    def __init__(self, seen: dict[int, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._seen, self._calls = seen, 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if attn_mask is not None or not is_causal:
            raise InputError(_NOT_CAUSAL.format("no is_causal" if attn_mask is None else "a mask"))
        call, self._calls = self._calls, self._calls + 1
        before = self._seen.get(call)
        if before is None:
            self._seen[call] = key, value
            return F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout_p, is_causal=True, **options
            )
        keys, values = (torch.cat(pair, -2) for pair in zip(before, (key, value), strict=True))
        self._seen[call] = keys, values
        places = query.shape[-2], keys.shape[-2]
        mask = query.new_ones(places, dtype=torch.bool).tril(places[1] - places[0])
        return F.scaled_dot_product_attention(
            query, keys, values, mask, dropout_p=dropout_p, **options
        )
