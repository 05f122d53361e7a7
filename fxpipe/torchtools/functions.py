"""Let reentrant checkpoints just compute their content: graphs leave checkpoints out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

_APPLY = torch.autograd.Function.__dict__["apply"]


class _ThreadState(threading.local):
    """How this thread treats reentrant checkpoints.

    Attributes:
        opens: whether they just compute their content.
    """

    opens = False


_HERE = _ThreadState()


@contextmanager
def checkpoints_opened() -> Iterator[None]:
    """Let reentrant checkpoints, inside the block and in this thread, just compute their content.

    Their own backward calls autograd, which ``torch.autograd.grad`` refuses.
    """
    opened = _HERE.opens
    apply = torch.autograd.Function.__dict__["apply"]
    _HERE.opens = True
    torch.autograd.Function.apply = classmethod(_applied)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        _HERE.opens = opened


def _applied(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``Function.apply`` while it is patched."""
    if function is not CheckpointFunction or not _HERE.opens:
        return _APPLY.__get__(None, function)(*args, **kwargs)
    run, _, *rest = args
    # without an input that requires a gradient, a checkpoint has no backward
    needed = any(isinstance(value, Tensor) and value.requires_grad for value in rest)
    with torch.set_grad_enabled(torch.is_grad_enabled() and needed):
        return run(*rest)
