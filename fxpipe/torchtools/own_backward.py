"""Autograd functions with a backward of their own, kept through a trace.

A tracer records what an ``autograd.Function`` computes forward, and its backward is lost. So while
a model is traced, ``apply`` becomes one operation, ``fxpipe::function``, that nothing looks into.
Wherever it runs under autograd afterwards, as when a stage is differentiated, it is the function
itself, and its own backward is what is written down.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from fxpipe.errors import TraceError


@dataclass
class _Call:
    """One call of a function, without its tensors.

    Attributes:
        function: the class.
        spec: how the arguments nest.
        leaves: the flat arguments, ``_TENSOR`` and ``_SIZE`` for those that are given each time.
        made: the spec of the result and its leaves, ``_TENSOR`` for tensors, once it has run.
    """

    function: Any
    spec: pytree.TreeSpec
    leaves: list[Any]
    made: tuple[pytree.TreeSpec, list[Any]] | None = field(default=None)

    def run(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Call the function itself, and return the tensors of its result."""
        given, numbers = iter(tensors), iter(sizes)
        leaves = [
            next(given) if leaf is _TENSOR else next(numbers) if leaf is _SIZE else leaf
            for leaf in self.leaves
        ]
        result = _apply(self.function, *pytree.tree_unflatten(leaves, self.spec))
        flat, spec = pytree.tree_flatten(result)
        self.made = spec, [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in flat]
        return [leaf for leaf in flat if isinstance(leaf, Tensor)]

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """The function's result, made of its tensors."""
        assert self.made is not None
        spec, leaves = self.made
        given = iter(tensors)
        return pytree.tree_unflatten(
            [next(given) if leaf is _TENSOR else leaf for leaf in leaves], spec
        )


_TENSOR, _SIZE = object(), object()
_CALLS: dict[str, _Call] = {}
_ORIGINAL = torch.autograd.Function.__dict__["apply"]


class _Here(threading.local):
    """What this thread does with functions.

    Attributes:
        keeps: whether each is one operation.
        opens: whether reentrant checkpoints are opened, as they are where functions are kept.
    """

    keeps = False
    opens = False


_HERE = _Here()


@contextmanager
def functions_kept() -> Iterator[None]:
    """Inside, in this thread, every autograd function that is applied is one operation."""
    with _patched(keeps=True, opens=True):
        yield


@contextmanager
def checkpoints_opened() -> Iterator[None]:
    """Inside, in this thread, a reentrant checkpoint computes what is in it, and no more.

    Its backward calls autograd itself, which ``torch.autograd.grad`` does not go along with.
    """
    with _patched(keeps=False, opens=True):
        yield


@contextmanager
def _patched(keeps: bool, opens: bool) -> Iterator[None]:
    before = _HERE.keeps, _HERE.opens
    apply = torch.autograd.Function.__dict__["apply"]
    _HERE.keeps, _HERE.opens = keeps, opens
    torch.autograd.Function.apply = classmethod(_applied)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        _HERE.keeps, _HERE.opens = before


def call(key: str, *args: Any) -> Any:
    """Graph node: apply the function that is known under ``key`` to these arguments."""
    return _apply(_CALLS[key].function, *args)


def _apply(function: Any, *args: Any) -> Any:
    before = _HERE.keeps
    _HERE.keeps = False
    try:
        return _ORIGINAL.__get__(None, function)(*args)
    finally:
        _HERE.keeps = before


def _applied(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``Function.apply`` does inside."""
    if function is CheckpointFunction and _HERE.opens:
        run, _, *rest = args
        # without such an input its backward would not run at all
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(map(_needs_gradient, rest))):
            return run(*rest)
    if not _HERE.keeps:
        return _ORIGINAL.__get__(None, function)(*args, **kwargs)
    leaves, spec = pytree.tree_flatten(args)
    if kwargs or function.__module__.partition(".")[0] == "torch":
        return _ORIGINAL.__get__(None, function)(*args, **kwargs)
    proxy = next((leaf for leaf in leaves if isinstance(leaf, fx.Proxy)), None)
    if proxy is not None:
        key = _key(_Call(function, spec, leaves))
        return proxy.tracer.create_proxy("call_function", call, (key, *args), {})
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
    one = _Call(function, spec, [_blank(leaf) for leaf in leaves])
    return one.result(torch.ops.fxpipe.function(tensors, sizes, _key(one)))


def _blank(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _TENSOR
    return _SIZE if isinstance(leaf, torch.SymInt) else leaf


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _key(one: _Call) -> str:
    """The name by which a graph knows a call."""
    key = f"{one.function.__module__}.{one.function.__qualname__}/{len(_CALLS)}"
    _CALLS[key] = one
    return key


def _opaque(tensors: Sequence[Tensor], sizes: Sequence[int], key: str) -> list[Tensor]:
    """The operation below autograd: the results are tensors of their own."""
    versions = [tensor._version for tensor in tensors]
    with torch.no_grad():
        made = _CALLS[key].run(tensors, sizes)
    if [tensor._version for tensor in tensors] != versions:
        raise TraceError(
            f"the autograd function {key.partition('/')[0]} writes into its input; let it work on "
            'a copy, or trace around it with tracer="symbolic"'
        )
    known = {tensor.untyped_storage()._cdata for tensor in tensors}
    found: list[Tensor] = []
    for tensor in made:
        storage = tensor.untyped_storage()._cdata
        found.append(tensor.clone() if storage in known else tensor)
        known.add(storage)
    return found


def _differentiable(tensors: Sequence[Tensor], sizes: Sequence[int], key: str) -> list[Tensor]:
    """The operation under autograd: while a model is traced it stays one, else it is opened."""
    if _HERE.keeps:
        with torch._C._AutoDispatchBelowAutograd():
            made: list[Tensor] = torch.ops.fxpipe.function(tensors, sizes, key)
            return made
    return _CALLS[key].run(tensors, sizes)


_LIBRARY = torch.library.Library("fxpipe", "FRAGMENT")
_LIBRARY.define("function(Tensor[] tensors, SymInt[] sizes, str key) -> Tensor[]")
_LIBRARY.impl("function", _opaque, "CompositeExplicitAutograd")
_LIBRARY.impl("function", _differentiable, "Autograd")
torch.library.register_fake("fxpipe::function", _opaque, lib=_LIBRARY)
