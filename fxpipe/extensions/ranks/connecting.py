"""Connecting to other processes by torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_POLL = 0.05


def within(store: Any, name: str) -> Any:
    """Return the part of a torch.distributed store whose keys begin with a name."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined,unused-ignore]


def interruptibly(work: Callable[[], T], look: Callable[[], None]) -> T:
    """Call ``work`` in another thread and return its result: it may block without letting Python
    handle signals. ``look`` is called repeatedly meanwhile; an error that it raises ends the wait.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fxpipe-meeting", daemon=True).start()
    while not wait([future], _POLL).done:
        look()
    return future.result()
