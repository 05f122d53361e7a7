"""Locking for threads that share pipes: one thread at a time in a pipe, none during a trace.

Tracing changes PyTorch for every thread: a model's tensors are replaced for its duration, modules
are called differently, and an optimizer that steps meanwhile takes itself for a part of the trace
and rounds differently. So a thread that traces waits until no pipe runs, and a thread that calls a
pipe waits for the trace to end. No thread holds one pipe while it waits for a trace. A pipe's own
worker threads, in which a leaf module may call another pipe, never wait for a trace; the trace
waits for them.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

import torch

from fxpipe.runtime.devices.backend import Worker, is_worker
from fxpipe.signals import SignalsAtOperations, raise_held

POLL = 0.01
"""Seconds after which a thread that waits to trace checks again, also for signals."""

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=Callable[..., Any])


class Turn:
    """The lock of a pipe."""

    _tracing: ClassVar = threading.RLock()
    _tracer: ClassVar[int | None] = None  # the thread that traces, or waits for pipes to finish
    _every: ClassVar[weakref.WeakValueDictionary[int, Turn]] = weakref.WeakValueDictionary()

    def __init__(self, workers: Sequence[Worker]) -> None:
        """No thread is inside.

        Args:
            workers: the pipe's threads.
        """
        self._workers = workers
        self._threads = frozenset(worker.thread for worker in workers)
        self._lock = threading.RLock()
        self._inside: int | None = None  # the thread that is inside
        self._waits = False  # whether that thread only waits to trace
        Turn._every[id(self)] = self

    def take(self, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function as the only thread inside, besides the pipe's own workers."""
        me = threading.get_ident()
        if self._inside == me or threading.current_thread() in self._threads:
            return do(*args, **kwargs)
        while True:
            with self._lock:
                if Turn._tracer in (None, me) or is_worker():
                    self._inside = me
                    try:
                        return do(*args, **kwargs)
                    finally:
                        self._inside = None
            with Turn._tracing:
                pass  # the trace of another thread is over

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block nothing else runs in any pipe. Ctrl-C ends the wait for that."""
        if is_worker():
            yield
            return
        with SignalsAtOperations():
            self._waits = self._inside == threading.get_ident()
            try:
                while not Turn._tracing.acquire(timeout=POLL):
                    raise_held()
            finally:
                self._waits = False
            before = Turn._tracer
            try:
                Turn._tracer = threading.get_ident()
                while not all(turn._quiet() for turn in Turn._known()):
                    raise_held()
                    time.sleep(POLL)
                yield
            finally:
                Turn._tracer = before
                Turn._tracing.release()

    def _quiet(self) -> bool:
        """Whether nothing runs in the pipe; the caller makes sure that nothing starts meanwhile."""
        if not self._waits:
            if not self._lock.acquire(blocking=False):
                return False
            self._lock.release()
        return all(worker.idle for worker in self._workers)

    @classmethod
    def _forked(cls) -> None:
        """Reset all locks in a forked process, which has none of the other threads."""
        cls._tracing, cls._tracer = threading.RLock(), None
        for turn in cls._known():
            turn._lock, turn._inside, turn._waits = threading.RLock(), None, False

    @classmethod
    def _known(cls) -> list[Turn]:
        """The locks of all pipes, as a list: other threads may make pipes at any time."""
        return [turn for ref in cls._every.valuerefs() if (turn := ref()) is not None]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Turn._forked)


def in_turn(method: M) -> M:
    """Decorate a method so that one thread at a time runs it; its object has a ``_turn``.

    ``torch.compile`` leaves the method as it is: what a pipe runs is compiled already.
    """

    @functools.wraps(method)
    def taking(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._turn.take(method, self, *args, **kwargs)

    return cast(M, torch.compiler.disable(taking))
