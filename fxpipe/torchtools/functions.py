"""Keep the backward of a user's ``autograd.Function`` through a trace.

A tracer records what the function computes in its forward; its own backward would be lost. So
while a model is traced, ``apply`` is recorded as one opaque operation, ``fxpipe::function``. When
that operation later runs under autograd, as when a stage is differentiated, it calls the function
itself, so that the stage's backward graph contains the function's own backward.

A hook that the model puts on a value's gradient would be lost, too, and is refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from fxpipe.errors import TraceError, way_out
from fxpipe.torchtools import source


@dataclass
class _Call:
    """One call of a function, without its tensors.

    Attributes:
        function: the subclass of ``autograd.Function``.
        spec: the pytree spec of the arguments.
        leaves: the flat arguments; ``_TENSOR`` and ``_SIZE`` stand for tensors and sizes, which
            are passed to each run.
        made: the spec and the leaves of the result, with ``_TENSOR`` for tensors; None before the
            first run.
    """

    function: Any
    spec: pytree.TreeSpec
    leaves: list[Any]
    made: tuple[pytree.TreeSpec, list[Any]] | None = None

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
        """The function's result, put together from its tensors."""
        assert self.made is not None
        spec, leaves = self.made
        given = iter(tensors)
        return pytree.tree_unflatten(
            [next(given) if leaf is _TENSOR else leaf for leaf in leaves], spec
        )


_TENSOR, _SIZE = object(), object()
_CALLS: dict[str, _Call] = {}
_APPLY = torch.autograd.Function.__dict__["apply"]
_REGISTER_HOOK: Any = Tensor.register_hook


class _ThreadState(threading.local):
    """How this thread treats autograd functions.

    Attributes:
        keeps: whether each one is recorded as one operation, and hooks on values are refused.
        opens: whether the content of reentrant checkpoints is traced instead of the checkpoint.
    """

    keeps = False
    opens = False


_HERE = _ThreadState()


@contextmanager
def functions_kept() -> Iterator[None]:
    """Inside, in this thread, each call of an autograd function is recorded as one operation, and
    ``tensor.register_hook`` raises TraceError."""
    with _patched(keeps=True):
        yield


@contextmanager
def checkpoints_opened() -> Iterator[None]:
    """Inside, in this thread, a reentrant checkpoint just computes its content.

    The backward of such a checkpoint calls autograd, which ``torch.autograd.grad`` refuses.
    """
    with _patched(keeps=False):
        yield


@contextmanager
def _patched(keeps: bool) -> Iterator[None]:
    before = _HERE.keeps, _HERE.opens
    apply, register = torch.autograd.Function.__dict__["apply"], Tensor.register_hook
    _HERE.keeps, _HERE.opens = keeps, True
    torch.autograd.Function.apply = classmethod(_applied)  # type: ignore[method-assign,assignment]
    Tensor.register_hook = _register_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        Tensor.register_hook = register  # type: ignore[method-assign]
        _HERE.keeps, _HERE.opens = before


def call(key: str, *args: Any) -> Any:
    """The target of a graph's node: apply the function of that key to these arguments."""
    return _apply(_CALLS[key].function, *args)


def _apply(function: Any, *args: Any) -> Any:
    before = _HERE.keeps
    _HERE.keeps = False
    try:
        return _APPLY.__get__(None, function)(*args)
    finally:
        _HERE.keeps = before


def _applied(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``Function.apply`` while it is patched."""
    if function is CheckpointFunction and _HERE.opens:
        run, _, *rest = args
        # without an input that requires a gradient its backward would not run at all
        needed = any(isinstance(value, Tensor) and value.requires_grad for value in rest)
        with torch.set_grad_enabled(torch.is_grad_enabled() and needed):
            return run(*rest)
    if not _HERE.keeps:
        return _APPLY.__get__(None, function)(*args, **kwargs)
    leaves, spec = pytree.tree_flatten(args)
    if kwargs or function.__module__.partition(".")[0] == "torch":
        return _APPLY.__get__(None, function)(*args, **kwargs)
    proxy = next((leaf for leaf in leaves if isinstance(leaf, fx.Proxy)), None)
    if proxy is not None:
        key = _key(_Call(function, spec, []))  # which needs its function alone
        return proxy.tracer.create_proxy("call_function", call, (key, *args), {})
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
    one = _Call(function, spec, [_blank(leaf) for leaf in leaves])
    return one.result(torch.ops.fxpipe.function(tensors, sizes, _key(one)))


def _register_hook(self: Tensor, hook: Any) -> Any:
    """Replaces ``Tensor.register_hook`` while it is patched."""
    frame = sys._getframe(1)
    if not _HERE.keeps or not source.is_users(frame.f_code.co_filename):
        return _REGISTER_HOOK(self, hook)
    where = source.of_frame(frame, frame.f_lineno)
    raise TraceError(
        f"the model puts a hook on the gradient of a value, at {where}, which no graph would "
        f"call; write it as a torch.autograd.Function with that backward, or {way_out('')}"
    )


def _blank(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _TENSOR
    return _SIZE if isinstance(leaf, torch.SymInt) else leaf


def _key(one: _Call) -> str:
    """The key of a call: the name by which a graph refers to it."""
    key = f"{one.function.__module__}.{one.function.__qualname__}/{len(_CALLS)}"
    _CALLS[key] = one
    return key


def _opaque(tensors: Sequence[Tensor], sizes: Sequence[int], key: str) -> list[Tensor]:
    """The operation below autograd. Its results share no memory with its inputs."""
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
    """The operation under autograd: opaque while a model is traced, else the function itself."""
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
