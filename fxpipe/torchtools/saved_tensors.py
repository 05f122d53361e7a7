"""What is saved for a backward, without the hooks that a user has set on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C import _autograd


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Inside, this thread's hooks on tensors that are saved for a backward are off.

    ``torch.utils.checkpoint`` sets such hooks around what it calls. They would take what a trace
    saves for what they count, and run real operations in the middle of a trace.
    """
    found: list[Any] = []
    while (hooks := _autograd._top_saved_tensors_default_hooks(False)) is not None:
        found.append(hooks)
        _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(found):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)
