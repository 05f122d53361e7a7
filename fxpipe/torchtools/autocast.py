"""Autocast as a value, so that what ran under it in one thread runs under it in another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Autocasts = tuple[tuple[str, torch.dtype], ...]
"""Each kind of device for which autocast is on, and to which dtype."""

_KINDS = ("cpu", "cuda")
_LOCK = threading.Lock()
_inside = 0
"""How many threads are inside of ``under``. PyTorch keeps what autocast has cast for all threads
together: whoever leaves first must not take it from the others, as the gradients of a weight that
is cast twice are added in another order."""


def autocasts() -> Autocasts:
    """Those of this thread."""
    on = filter(torch.is_autocast_enabled, _KINDS)
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in on)


@contextmanager
def under(casts: Autocasts) -> Iterator[None]:
    """Inside, this thread has these, and no others."""
    global _inside
    before, wanted = autocasts(), dict(casts)
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in _KINDS}
    with _LOCK:
        _inside += 1
    torch.autocast_increment_nesting()
    try:
        _set({**dtypes, **wanted}, wanted)
        yield
    finally:
        _set(dtypes, dict(before))
        outermost = torch.autocast_decrement_nesting() == 0
        with _LOCK:
            _inside -= 1
            if outermost and not _inside:
                torch.clear_autocast_cache()


def uncached(value: Any) -> Any:
    """The same value, which autocast casts once for each use, as any activation. It casts a leaf of
    autograd's, such as a parameter, once for all uses, so that gradients are added before they are
    cast back."""
    leaf = isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
    return value.view_as(value) if leaf else value


def called_under(casts: Autocasts, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which runs under these."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with under(casts):
            return function(*args, **kwargs)

    return called


def _set(dtypes: dict[str, torch.dtype], on: dict[str, torch.dtype]) -> None:
    for kind, dtype in dtypes.items():
        torch.set_autocast_enabled(kind, kind in on)
        torch.set_autocast_dtype(kind, dtype)
