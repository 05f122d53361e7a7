"""Ctrl-C where it can do no harm: what a signal's handler raises is held until a safe place."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ClassVar

_SIGNALS = tuple(signal.valid_signals())

_OPERATIONS = frozenset(
    ("forward", "_call_impl", "__call__", "run_node", "run", "node_copy", "create_node")
)
_COMPILING = ("fxpipe.passes.", "fxpipe.compiler.")
"""Where calls of our own functions are as good as operations: they change nothing of the model."""

_DELICATE = frozenset(("__enter__", "__exit__", "__del__", "__torch_dispatch__"))
"""Functions inside of which nothing may be raised: they change what must be changed back, or
C++ has called them, which passes not every exception on."""


class HeldSignals:
    """While it is entered, an exception of a signal handler is held instead of raised.

    Python raises KeyboardInterrupt between any two steps of the main thread, so no code could
    promise that something happens as a whole or not at all. Inside, every handler runs as ever
    and at once; only what it raises waits, and ``wake`` tells whoever waits to look at ``held``.
    Leaving raises what nobody has taken. In other threads, which get no signals, this does
    nothing. Of two that are entered one inside of the other, the inner one holds.

    Attributes:
        held: what a handler has raised, the latest if there were several.
    """

    _innermost: ClassVar[HeldSignals | None] = None  # of those that the main thread has entered

    def __init__(self, wake: Callable[[], None]) -> None:
        """Nothing is held yet.

        Args:
            wake: called after an exception was held; it may come at any point of the block.
        """
        self.held: BaseException | None = None
        self._wake = wake
        self._before: dict[int, Any] = {}
        self._called: dict[int, Any] = {}
        self._own: Any = None
        self._around: HeldSignals | None = None

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        # to ask for all signals takes as long as a small step's bookkeeping: it is done once
        around = HeldSignals._innermost
        numbers = _SIGNALS if around is None else tuple(around._before)
        handlers = {number: signal.getsignal(number) for number in numbers}
        self._before = {n: handler for n, handler in handlers.items() if callable(handler)}
        self._called = {n: _in_the_end(n, handler) for n, handler in self._before.items()}
        self._own = self._hold  # one object: a bound method is a new one each time
        try:
            for number in self._before:
                signal.signal(number, self._own)
            self._around, HeldSignals._innermost = around, self
        except BaseException:
            self._put_back()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if HeldSignals._innermost is self:
            HeldSignals._innermost, self._around = self._around, None
        self._put_back()
        held = self.take()
        try:
            if held is not None and held is not error:
                raise held
        finally:
            held = None  # or the exception and this frame would hold each other

    def take(self) -> BaseException | None:
        """What is held; it is the caller's to raise then."""
        held, self.held = self.held, None
        return held

    def _put_back(self) -> None:
        """Let signals be handled as before. Ctrl-C, one of the first of them, comes last."""
        for number, handler in reversed(self._before.items()):
            if signal.getsignal(number) is self._own:  # else a handler has put another one there
                signal.signal(number, handler)
        self._before, self._called, self._own = {}, {}, None

    def _hold(self, number: int, frame: FrameType | None) -> None:
        try:
            self._called[number](number, frame)
        except BaseException as error:
            self.held = error
            self._wake()


def raise_held() -> None:
    """Raise what is held, for whoever waits where it would not come by itself."""
    holder = HeldSignals._innermost
    if holder is not None and threading.current_thread() is threading.main_thread():
        held = holder.take()
        try:
            if held is not None:
                raise held
        finally:
            held = None  # or the exception and this frame would hold each other


def _in_the_end(number: int, handler: Any) -> Any:
    """What is called for a signal in the end: not the handler of one that is entered around."""
    owner = getattr(handler, "__self__", None)
    return owner._called[number] if isinstance(owner, HeldSignals) else handler


class SignalsAtOperations(HeldSignals):
    """While it is entered, an exception of a signal handler comes where an operation could fail.

    Tracing changes much inside of PyTorch for as long as it runs, and an exception in the middle
    of such a change leaves all later traces wrong; one in a callback of a weak reference, of which
    a trace leaves thousands, Python drops altogether. Once one is held, this watches the functions
    that are called, and raises it at the first that is an operation of a model, a node of a graph
    or a part of a pass, where errors are expected; never while a context manager is entered or
    left.
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
            self._base = entering.f_back  # it is entered inside of a context manager
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        each: FrameType | None = frame
        while each is not None and each is not self._base:
            if each.f_code.co_name in _DELICATE:
                return
            each = each.f_back
        if self.held is not None:
            self._unwatch()
            raise self.held


def _may_fail(frame: FrameType, event: str) -> bool:
    """Whether what a profiler was told of is a place where errors are expected."""
    if event in ("call", "c_call") and frame.f_code.co_name in _OPERATIONS:
        return True
    name = frame.f_globals.get("__name__", "")
    return event == "call" and isinstance(name, str) and name.startswith(_COMPILING)


def put_back(profiler: Any) -> None:
    """Let what ``sys.getprofile`` gave before be the thread's profiler again.

    One that is written in C, as that of cProfile, is no function that Python can call.
    """
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        sys.setprofile(None)
        profiler.enable()
