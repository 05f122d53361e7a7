"""Locking for threads that share pipes: one thread at a time in a pipe, none during a trace.

Tracing changes PyTorch for every thread: while it lasts, a model's tensors are replaced, modules
are called differently, and an optimizer that steps in another thread takes the path for traces and
rounds differently. So a thread that traces waits until no pipe runs, and a thread that calls a pipe
waits for the trace to end. No thread holds one pipe while it waits for a trace. A pipe's worker
threads, in which a module may call another pipe, never wait for a trace; the trace waits for them.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, cast

from torch._compile import _disable_dynamo  # torch.compiler.disable is slow to import

from fxpipe.errors import FxpipeError, PassError, TraceError
from fxpipe.log import LOGGER
from fxpipe.runtime.backend import Worker, is_worker
from fxpipe.signals import HeldSignals, raise_held
from fxpipe.torchtools.source import called_by_ours

POLL = 0.01
"""Seconds after which a thread that waits to trace checks again, also for signals."""

R = TypeVar("R")
M = TypeVar("M", bound=Callable[..., Any])


class PipeLock:
    """The lock of a pipe."""

    _tracing: ClassVar = threading.RLock()
    _tracer: ClassVar[int | None] = None  # the thread that traces, or waits for pipes to finish
    _every: ClassVar[weakref.WeakValueDictionary[int, PipeLock]] = weakref.WeakValueDictionary()

    def __init__(self, workers: Sequence[Worker]) -> None:
        """Make the lock of the pipe with these workers; no thread is inside."""
        self._workers = workers
        self._threads = frozenset(worker.thread for worker in workers)
        self._lock = threading.RLock()
        self._inside: int | None = None  # the thread that is inside
        self._waits = False  # whether that thread is waiting to trace
        PipeLock._every[id(self)] = self

    def call(
        self,
        do: Callable[..., R],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> R:
        """Call a function as the only thread inside, besides the pipe's own workers."""
        me = threading.get_ident()
        if self._inside == me or threading.current_thread() in self._threads:
            return do(*args, **kwargs)
        while True:
            with self._lock:
                if PipeLock._tracer in (None, me) or is_worker():
                    self._inside = me
                    try:
                        return do(*args, **kwargs)
                    finally:
                        self._inside = None
            with PipeLock._tracing:
                pass  # the trace of another thread is over

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Run the block while nothing runs in any pipe. Ctrl-C ends the wait for that."""
        if is_worker():
            yield
            return
        with HeldSignals():
            self._waits = self._inside == threading.get_ident()
            try:
                while not PipeLock._tracing.acquire(timeout=POLL):
                    raise_held()
            finally:
                self._waits = False
            before = PipeLock._tracer
            try:
                PipeLock._tracer = threading.get_ident()
                while not all(lock._quiet() for lock in PipeLock._known()):
                    raise_held()
                    time.sleep(POLL)
                yield
            finally:
                PipeLock._tracer = before
                PipeLock._tracing.release()

    def _quiet(self) -> bool:
        """Whether nothing runs in the pipe. The caller makes sure that nothing can start."""
        if not self._waits:
            if not self._lock.acquire(blocking=False):
                return False
            self._lock.release()
        return all(worker.idle for worker in self._workers)

    @classmethod
    def _known(cls) -> list[PipeLock]:
        """The locks of all pipes; a list, as other threads may make pipes meanwhile."""
        return [lock for ref in cls._every.valuerefs() if (lock := ref()) is not None]


def locked(method: M) -> M:
    """Decorate a method of an object with a ``_lock``, so that one thread at a time runs it.

    ``torch.compile`` leaves the method as it is: what a pipe runs is compiled already.
    """

    @functools.wraps(method)
    def call_locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._lock.call(method, (self, *args), kwargs)
        except PassError:  # a bug of a pass: the traceback is what matters
            raise
        except FxpipeError as error:  # names the user's line; the traceback goes to the log
            LOGGER.debug("a call fails", exc_info=error)
            error.__traceback__ = None
            if isinstance(error, TraceError):
                raise error from None
            if error.__cause__ is not None:
                error.__cause__.__traceback__ = called_by_ours(error.__cause__.__traceback__)
            raise error

    return cast(M, _disable_dynamo(call_locked))
