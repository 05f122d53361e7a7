"""Refuse what a trace of a model would lose: backwards that its author wrote, hooks on gradients.

A tracer records only what an ``autograd.Function`` computes in its forward. So a module that calls
one has to be called as it is, under autograd. Reentrant checkpoints, which are such functions, just
compute their content: graphs leave checkpoints out.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from fxpipe.errors import TraceError, way_out
from fxpipe.torchtools import source

_APPLY = torch.autograd.Function.__dict__["apply"]
_REGISTER_HOOK: Any = Tensor.register_hook
_RETAIN_GRAD: Any = Tensor.retain_grad


class OwnBackwardError(Exception):
    """A trace has met a function with a backward of its own."""


class _ThreadState(threading.local):
    """How this thread treats autograd functions.

    Attributes:
        refuses: whether functions and hooks on values are refused.
        opens: whether reentrant checkpoints just compute their content.
    """

    refuses = False
    opens = False


_HERE = _ThreadState()


@contextmanager
def checkpoints_opened(*, refuses: bool = False) -> Iterator[None]:
    """Let reentrant checkpoints, inside the block and in this thread, just compute their content.

    Their own backward calls autograd, which ``torch.autograd.grad`` refuses.

    Args:
        refuses: whether other functions raise OwnBackwardError, and ``tensor.register_hook`` and
            ``tensor.retain_grad`` TraceError.
    """
    before = _HERE.refuses, _HERE.opens
    apply = torch.autograd.Function.__dict__["apply"]
    register, retain = Tensor.register_hook, Tensor.retain_grad
    _HERE.refuses, _HERE.opens = refuses, True
    torch.autograd.Function.apply = classmethod(_applied)  # type: ignore[method-assign,assignment]
    Tensor.register_hook = _register_hook  # type: ignore[method-assign]
    Tensor.retain_grad = _retain_grad  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        Tensor.register_hook = register  # type: ignore[method-assign]
        Tensor.retain_grad = retain  # type: ignore[method-assign]
        _HERE.refuses, _HERE.opens = before


def _applied(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``Function.apply`` while it is patched."""
    if function is CheckpointFunction and _HERE.opens:
        run, _, *rest = args
        # without an input that requires a gradient, a checkpoint has no backward
        needed = any(isinstance(value, Tensor) and value.requires_grad for value in rest)
        with torch.set_grad_enabled(torch.is_grad_enabled() and needed):
            return run(*rest)
    if _HERE.refuses and function.__module__.partition(".")[0] != "torch":
        raise OwnBackwardError(
            f"{function.__qualname__} is a torch.autograd.Function, whose backward no trace sees"
        )
    return _APPLY.__get__(None, function)(*args, **kwargs)


def _refusing(method: Any, does: str) -> Any:
    """Replaces a method of tensors that gives them hooks, while it is patched."""

    def called(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _HERE.refuses and source.is_users(sys._getframe(1).f_code.co_filename):
            raise _unheld(does)
        return method(self, *args, **kwargs)

    return called


def _unheld(does: str) -> TraceError:
    """The error for what the innermost code of the user's does with gradients."""
    frame = sys._getframe(source.users_level() - 1)
    where = source.of_frame(frame, frame.f_lineno)
    return TraceError(
        f"the model {does}, at {where}, which no graph has; leave that line out, or {way_out('')}"
    )


_register_hook = _refusing(_REGISTER_HOOK, "registers a hook on the gradient of a value")
_retain_grad = _refusing(_RETAIN_GRAD, "retains the gradient of a value")
