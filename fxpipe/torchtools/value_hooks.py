"""Refuse ``tensor.register_hook`` while a model is traced: no graph would call the hook."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fxpipe.errors import TraceError, way_out
from fxpipe.torchtools import source

_ORIGINAL: Any = Tensor.register_hook
_LOCK = threading.Lock()
_inside = 0


class _Here(threading.local):
    """Whether this thread is tracing a model."""

    refuses = False


_HERE = _Here()


@contextmanager
def value_hooks_refused() -> Iterator[None]:
    """Inside, in this thread, ``tensor.register_hook`` raises TraceError."""
    global _inside
    before = _HERE.refuses
    _HERE.refuses = True
    with _LOCK:
        _inside += 1
        Tensor.register_hook = _register_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        _HERE.refuses = before
        with _LOCK:
            _inside -= 1
            if not _inside:
                Tensor.register_hook = _ORIGINAL  # type: ignore[method-assign]


def _register_hook(self: Tensor, hook: Any) -> Any:
    if not _HERE.refuses:
        return _ORIGINAL(self, hook)
    frame = sys._getframe(1)
    if not source.is_users(frame.f_code.co_filename):
        return _ORIGINAL(self, hook)
    where = source.of_frame(frame, frame.f_lineno)
    raise TraceError(
        f"the model puts a hook on the gradient of a value, at {where}, which no graph would "
        f"call; write it as a torch.autograd.Function with that backward, or {way_out('')}"
    )
