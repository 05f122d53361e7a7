"""Make Ctrl-C safe: hold an exception of a signal handler, and raise it at a safe point."""

from __future__ import annotations

import signal
import sys
import threading
from _signal import getsignal  # type: ignore[import-not-found]
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, ClassVar

# _signal.getsignal is twenty times faster than signal.getsignal, which looks each handler up in an
# enumeration. For all signals, that took a tenth of the smallest steps.
_SIGNALS = tuple(signal.valid_signals())

_OPERATIONS = frozenset(
    ("forward", "_call_impl", "__call__", "run_node", "run", "node_copy", "create_node")
)
_COMPILING = ("fxpipe.passes.", "fxpipe.compiler.")
"""Modules whose function calls are safe points, too: they do not change the model."""

_DELICATE = frozenset(("__enter__", "__exit__", "__del__", "__torch_dispatch__"))
"""Functions inside which no held exception is raised: they make changes that must be undone, or C++
calls them, which does not pass every exception on."""


class HeldSignals:
    """Hold back the exceptions that signal handlers raise inside the block.

    Python raises KeyboardInterrupt between any two instructions of the main thread, so without
    this no code could promise that something happens completely or not at all. Inside, every
    handler still runs at once; only its exception is held, and ``wake`` makes a waiting caller look
    at ``held``. Leaving the block raises the exception unless ``take`` has fetched it. In other
    threads, which get no signals, this does nothing. Of nested blocks, the inner one holds.

    Attributes:
        held: the exception of a handler, the latest if there were several.
    """

    _innermost: ClassVar[HeldSignals | None] = None  # the innermost block of the main thread

    def __init__(self, wake: Callable[[], None]) -> None:
        """``wake`` is called after an exception was held, anywhere in the block."""
        self.held: BaseException | None = None
        self._wake = wake
        self._before: dict[int, Any] = {}  # signal → the handler installed before the block
        self._called: dict[int, Any] = {}  # signal → the user's handler
        self._installed: Any = None
        self._around: HeldSignals | None = None

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        around = HeldSignals._innermost
        numbers = _SIGNALS if around is None else tuple(around._before)
        handlers = {number: getsignal(number) for number in numbers}
        self._before = {n: handler for n, handler in handlers.items() if callable(handler)}
        self._called = {n: _users(n, handler) for n, handler in self._before.items()}
        self._installed = self._hold  # kept to compare: each access makes another bound method
        try:
            for number in self._before:
                signal.signal(number, self._installed)
            self._around, HeldSignals._innermost = around, self
        except BaseException:
            self._put_back()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if HeldSignals._innermost is self:
            HeldSignals._innermost, self._around = self._around, None
        self._put_back()
        self.raise_held(error)

    def raise_held(self, other_than: BaseException | None = None) -> None:
        """Raise the held exception, if there is one and it is another than the given one."""
        held = self.take()
        try:
            if held is not None and held is not other_than:
                raise held
        finally:
            held = None  # else the exception and this frame would refer to each other

    def take(self) -> BaseException | None:
        """Return the held exception and forget it; the caller has to raise it."""
        held, self.held = self.held, None
        return held

    def _put_back(self) -> None:
        """Restore the signal handlers, the one for Ctrl-C last."""
        for number, handler in reversed(self._before.items()):
            if getsignal(number) is self._installed:  # else a handler has installed another one
                signal.signal(number, handler)
        self._before, self._called, self._installed = {}, {}, None

    def _hold(self, number: int, frame: FrameType | None) -> None:
        try:
            self._called[number](number, frame)
        except BaseException as error:
            self.held = error
            self._wake()


def raise_held() -> None:
    """Raise the exception that the innermost block holds, if any; for waits inside the block."""
    holder = HeldSignals._innermost
    if holder is not None and threading.current_thread() is threading.main_thread():
        holder.raise_held()


def _users(number: int, handler: Any) -> Any:
    """The user's handler, which the handler of a surrounding block stands for."""
    owner = getattr(handler, "__self__", None)
    return owner._called[number] if isinstance(owner, HeldSignals) else handler


class SignalsAtOperations(HeldSignals):
    """Inside the block, raise an exception of a signal handler only where an operation could fail.

    Tracing changes much inside PyTorch while it runs; an exception in the middle of such a change
    makes all later traces wrong. And Python drops an exception in the callback of a weak reference,
    of which a trace makes thousands. So once an exception is held, this watches function calls and
    raises it at the first operation of a model, node of a graph or part of a pass, where errors are
    expected; never while a context manager is entered or left.
    """

    def __init__(self) -> None:
        super().__init__(self._watch)
        self._base: FrameType | None = None
        self._profile: Any = None
        self._watches = False

    def __enter__(self) -> SignalsAtOperations:
        super().__enter__()
        self._base = sys._getframe(1)
        entering = self._base.f_back
        if entering is not None and entering.f_code.co_name == "__enter__":
            self._base = entering.f_back  # skips the frame of the context manager around this one
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._unwatch()
        self._base = None
        super().__exit__(kind, error, trace)

    def _watch(self) -> None:
        if not self._watches:
            self._watches, self._profile = True, sys.getprofile()
            sys.setprofile(self._look)

    def _unwatch(self) -> None:
        if self._watches:
            self._watches = False
            put_back(self._profile)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if not _may_fail(frame, event):
            return
        caller: FrameType | None = frame
        while caller is not None and caller is not self._base:
            if caller.f_code.co_name in _DELICATE:
                return
            caller = caller.f_back
        if self.held is not None:
            self._unwatch()
            raise self.held


def signals_at_operations() -> AbstractContextManager[object]:
    """A ``SignalsAtOperations``, unless a surrounding block holds signals already."""
    around = HeldSignals._innermost
    main = threading.current_thread() is threading.main_thread()
    return nullcontext() if main and around is not None else SignalsAtOperations()


def _may_fail(frame: FrameType, event: str) -> bool:
    """Whether a profiler event is at a place where errors are expected."""
    if event in ("call", "c_call") and frame.f_code.co_name in _OPERATIONS:
        return True
    name = frame.f_globals.get("__name__", "")
    return event == "call" and isinstance(name, str) and name.startswith(_COMPILING)


def put_back(profiler: Any) -> None:
    """Set the thread's profiler to one that ``sys.getprofile`` returned before.

    A profiler written in C, such as cProfile's, is not callable and enables itself.
    """
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        sys.setprofile(None)
        profiler.enable()
