"""Threads that share pipes: one at a time is inside of a pipe, and none while another traces.

Tracing changes PyTorch for every thread: the tensors of a model are others meanwhile, modules are
called in another way, and an optimizer that steps takes itself for a part of the trace and rounds
otherwise. So whoever traces waits until no pipe runs, and whoever comes to a pipe waits for the
trace. Nobody holds a pipe while waiting to get into it. Threads of pipes, in which a leaf module
may call another pipe, never wait for a trace: that one waits for them.
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
"""Seconds after which whoever waits to trace looks again, also for signals."""

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=Callable[..., Any])


class Turn:
    """The right to be inside of a pipe."""

    _tracing: ClassVar = threading.RLock()
    _tracer: ClassVar[int | None] = None  # the thread that has it, or waits for others to be done
    _every: ClassVar[weakref.WeakValueDictionary[int, Turn]] = weakref.WeakValueDictionary()

    def __init__(self, workers: Sequence[Worker]) -> None:
        """Nobody is inside.

        Args:
            workers: the pipe's threads.
        """
        self._workers = workers
        self._threads = frozenset(worker.thread for worker in workers)
        self._lock = threading.RLock()
        self._inside: int | None = None  # the thread that is
        self._waits = False  # whether it only waits to trace
        Turn._every[id(self)] = self

    def take(self, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Do something as the only thread that is inside; the pipe's own are there anyway."""
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
        """Within it nothing else runs in any pipe; Ctrl-C ends the wait for that."""
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
        """Whether nobody runs anything in the pipe; while this is asked nobody new comes in."""
        if not self._waits:
            if not self._lock.acquire(blocking=False):
                return False
            self._lock.release()
        return all(worker.idle for worker in self._workers)

    @classmethod
    def _forked(cls) -> None:
        """In a forked process nobody is inside: the other threads are not there."""
        cls._tracing, cls._tracer = threading.RLock(), None
        for turn in cls._known():
            turn._lock, turn._inside, turn._waits = threading.RLock(), None, False

    @classmethod
    def _known(cls) -> list[Turn]:
        """Those of all pipes; a list is made at once, and threads make pipes at any time."""
        return [turn for ref in cls._every.valuerefs() if (turn := ref()) is not None]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Turn._forked)


def in_turn(method: M) -> M:
    """Let threads take turns in a method of a pipe, or of a part of it that has its ``_turn``.

    It is no part of what ``torch.compile`` compiles: what a pipe runs is compiled already.
    """

    @functools.wraps(method)
    def taking(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._turn.take(method, self, *args, **kwargs)

    return cast(M, torch.compiler.disable(taking))
