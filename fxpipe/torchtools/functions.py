"""Keep the backward of a user's ``autograd.Function`` through a trace.

A tracer records only what the function computes in its forward; its backward would be lost. So
while a model is traced, ``apply`` is recorded as one opaque operation, ``fxpipe::function``. When
that operation later runs under autograd, for example when a stage is differentiated, it calls the
function itself, so that the stage's backward graph contains the function's own backward.

Hooks on the gradients of values would be lost, too, and are refused.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
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
    """

    function: Any
    spec: pytree.TreeSpec
    leaves: list[Any]

    def run(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Call the function itself, and return the tensors of its result."""
        args = pytree.tree_unflatten(_filled(self.leaves, tensors, sizes), self.spec)
        flat, spec = pytree.tree_flatten(_apply(self.function, *args))
        _HERE.output = spec, [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in flat]
        return [leaf for leaf in flat if isinstance(leaf, Tensor)]

    def text(self) -> str:
        """The call as text, which tells nothing of this process, such as an object's address."""
        marks = {id(_TENSOR): "tensor", id(_SIZE): "size"}
        leaves = (
            repr(leaf) if isinstance(leaf, _PLAIN) else marks.get(id(leaf), type(leaf).__qualname__)
            for leaf in self.leaves
        )
        return f"{self.function.__module__}.{self.function.__qualname__}({', '.join(leaves)})"

    def equals(self, other: _Call) -> bool:
        """Whether one can stand for the other."""
        return (
            self.function is other.function
            and self.spec == other.spec
            and all(
                a is b or (isinstance(a, _PLAIN) and type(a) is type(b) and repr(a) == repr(b))
                for a, b in zip(self.leaves, other.leaves, strict=True)
            )
        )


def _filled(leaves: list[Any], tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Any]:
    """The leaves with tensors and sizes in place of ``_TENSOR`` and ``_SIZE``."""
    left = {_TENSOR: iter(tensors), _SIZE: iter(sizes)}
    return [next(left[leaf]) if leaf is _TENSOR or leaf is _SIZE else leaf for leaf in leaves]


_TENSOR, _SIZE = object(), object()
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))
_CALLS: dict[str, _Call] = {}
_APPLY = torch.autograd.Function.__dict__["apply"]
_REGISTER_HOOK: Any = Tensor.register_hook
_RETAIN_GRAD: Any = Tensor.retain_grad


class _ThreadState(threading.local):
    """How this thread treats autograd functions.

    Attributes:
        keeps: whether each function is recorded as one operation, and hooks on values are refused.
        opens: whether reentrant checkpoints just compute their content.
        output: the spec and the leaves of the last result, with ``_TENSOR`` for tensors.
    """

    keeps = False
    opens = False
    output: tuple[pytree.TreeSpec, list[Any]] | None = None


_HERE = _ThreadState()


def functions_kept() -> AbstractContextManager[None]:
    """Record each call of an autograd function, inside the block and in this thread, as one
    operation; ``tensor.register_hook`` and ``tensor.retain_grad`` raise TraceError."""
    return _patched(keeps=True)


def checkpoints_opened() -> AbstractContextManager[None]:
    """Let reentrant checkpoints, inside the block and in this thread, just compute their content.

    Their own backward calls autograd, which ``torch.autograd.grad`` refuses.
    """
    return _patched(keeps=False)


@contextmanager
def _patched(keeps: bool) -> Iterator[None]:
    before = _HERE.keeps, _HERE.opens
    apply = torch.autograd.Function.__dict__["apply"]
    register, retain = Tensor.register_hook, Tensor.retain_grad
    _HERE.keeps, _HERE.opens = keeps, True
    torch.autograd.Function.apply = classmethod(_applied)  # type: ignore[method-assign,assignment]
    Tensor.register_hook = _register_hook  # type: ignore[method-assign]
    Tensor.retain_grad = _retain_grad  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        Tensor.register_hook = register  # type: ignore[method-assign]
        Tensor.retain_grad = retain  # type: ignore[method-assign]
        _HERE.keeps, _HERE.opens = before


def call(key: str, *args: Any) -> Any:
    """Apply the function of a key to arguments; the target of a node in a graph."""
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
        # without an input that requires a gradient, a checkpoint has no backward
        needed = any(isinstance(value, Tensor) and value.requires_grad for value in rest)
        with torch.set_grad_enabled(torch.is_grad_enabled() and needed):
            return run(*rest)
    if not _HERE.keeps or kwargs or function.__module__.partition(".")[0] == "torch":
        return _APPLY.__get__(None, function)(*args, **kwargs)
    leaves, spec = pytree.tree_flatten(args)
    proxy = next((leaf for leaf in leaves if isinstance(leaf, fx.Proxy)), None)
    if proxy is not None:
        key = _key(_Call(function, spec, []))  # ``call`` needs only the function
        return proxy.tracer.create_proxy("call_function", call, (key, *args), {})
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
    recorded = _Call(function, spec, [_blank(leaf) for leaf in leaves])
    outputs = torch.ops.fxpipe.function(tensors, sizes, _key(recorded))
    assert _HERE.output is not None
    spec, leaves = _HERE.output
    return pytree.tree_unflatten(_filled(leaves, outputs, ()), spec)


def _register_hook(self: Tensor, hook: Any) -> Any:
    """Replaces ``Tensor.register_hook`` while it is patched."""
    if _HERE.keeps and source.is_users(sys._getframe(1).f_code.co_filename):
        raise unheld("register_hook")
    return _REGISTER_HOOK(self, hook)


def _retain_grad(self: Tensor) -> None:
    """Replaces ``Tensor.retain_grad`` while it is patched."""
    if _HERE.keeps and source.is_users(sys._getframe(1).f_code.co_filename):
        raise unheld("retain_grad")
    _RETAIN_GRAD(self)


ON_GRADIENTS = {
    "register_hook": (
        "registers a hook on the gradient of a value",
        "which no graph would call; write a torch.autograd.Function with that backward",
    ),
    "retain_grad": (
        "retains the gradient of a value",
        "which no graph would keep; leave that line out",
    ),
}
"""Methods of tensors that are about gradients → what the model does with them, and what to do
instead."""


def unheld(method: str) -> TraceError:
    """The error for one of ``ON_GRADIENTS``, called by the innermost code of the user's."""
    frame = sys._getframe(source.users_level() - 1)
    does, cure = ON_GRADIENTS[method]
    where = source.of_frame(frame, frame.f_lineno)
    return TraceError(f"the model {does}, at {where}, {cure}, or {way_out('')}")


def _blank(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _TENSOR
    return _SIZE if isinstance(leaf, torch.SymInt) else leaf


def _key(recorded: _Call) -> str:
    """Store a call, and return the key by which a graph refers to it: its text, with a number if
    other calls have the same text, such as of two local classes of one name."""
    key = text = recorded.text()
    for number in count(1):
        if recorded.equals(_CALLS.setdefault(key, recorded)):
            return key
        key = f"{text}#{number}"
    raise AssertionError


def unnumbered(text: str) -> str:
    """The text of a graph without the numbers of keys, which depend on earlier traces."""
    return re.sub(r"#\d+(?=['\"])", "", text)


def _opaque(tensors: Sequence[Tensor], sizes: Sequence[int], key: str) -> list[Tensor]:
    """The operation below autograd. Its results share no memory with its inputs or each other."""
    versions = [tensor._version for tensor in tensors]
    with torch.no_grad():
        outputs = _CALLS[key].run(tensors, sizes)
    if [tensor._version for tensor in tensors] != versions:
        raise TraceError(
            f"the autograd function {key.partition('(')[0]} writes into its input; let it work on "
            f"a copy, or {way_out('')}"
        )
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    unshared: list[Tensor] = []
    for tensor in outputs:
        storage = tensor.untyped_storage()._cdata
        unshared.append(tensor.clone() if storage in storages else tensor)
        storages.add(storage)
    return unshared


def _differentiable(tensors: Sequence[Tensor], sizes: Sequence[int], key: str) -> list[Tensor]:
    """The operation under autograd: opaque while a model is traced, else the function itself."""
    if _HERE.keeps:
        with torch._C._AutoDispatchBelowAutograd():
            outputs: list[Tensor] = torch.ops.fxpipe.function(tensors, sizes, key)
            return outputs
    return _CALLS[key].run(tensors, sizes)


_LIBRARY = torch.library.Library("fxpipe", "FRAGMENT")
_LIBRARY.define("function(Tensor[] tensors, SymInt[] sizes, str key) -> Tensor[]")
_LIBRARY.impl("function", _opaque, "CompositeExplicitAutograd")
_LIBRARY.impl("function", _differentiable, "Autograd")
torch.library.register_fake("fxpipe::function", _opaque, lib=_LIBRARY)
