"""Make Ctrl-C safe: hold an exception of a signal handler, and raise it at a safe point."""

from __future__ import annotations

import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

# _signal.getsignal is twenty times faster than signal.getsignal, which looks each handler up in an
# enumeration. For all signals, that took a tenth of the smallest steps.
_SIGNALS = tuple(signal.valid_signals())


class HeldSignals:
    """Hold back the exceptions that signal handlers raise inside the block.

    Python raises KeyboardInterrupt between any two instructions of the main thread, so without
    this no code could promise that something happens completely or not at all. Inside, every
    handler still runs at once; only its exception is held, and ``wake`` makes a waiting caller look
    at ``held``. Leaving the block raises the exception unless ``take`` has fetched it. In other
    threads, which get no signals, this does nothing. Of nested blocks, the outermost installs the
    handlers, and the inner one holds.

    Tracing changes much inside PyTorch while it runs, and Python drops an exception in the callback
    of a weak reference, of which a trace makes thousands. So a trace, and each pass, is such a
    block as a whole.

    Attributes:
        held: the exception of a handler, the latest if there were several.
    """

    _innermost: ClassVar[HeldSignals | None] = None  # the innermost block of the main thread

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """``wake`` is called after an exception was held, anywhere in the block."""
        self.held: BaseException | None = None
        self._wake = wake
        self._called: dict[int, Any] = {}  # signal → the user's handler, in the outermost block
        self._around: HeldSignals | None = None

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        around = HeldSignals._innermost
        try:
            if around is None:
                for number in _SIGNALS:
                    if callable(handler := getsignal(number)):
                        self._called[number] = handler
                        signal.signal(number, self._hold)
            self._around, HeldSignals._innermost = around, self
        except BaseException:
            self._put_back()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if HeldSignals._innermost is self:
            HeldSignals._innermost, self._around = self._around, None
        if self._called:
            self._put_back()
        if self.held is not None:
            self.raise_held(error)

    def raise_held(self, other_than: BaseException | None = None) -> None:
        """Raise the held exception, if there is one and it is another than the given one."""
        held, self.held = self.held, None
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
        for number, handler in reversed(self._called.items()):
            if getsignal(number) == self._hold:  # else a handler has installed another one
                signal.signal(number, handler)
        self._called = {}

    def _hold(self, number: int, frame: FrameType | None) -> None:
        try:
            self._called[number](number, frame)
        except BaseException as error:
            block = HeldSignals._innermost or self
            block.held = error
            block._wake()


def raise_held() -> None:
    """Raise the exception that the innermost block holds, if any; for waits inside the block."""
    holder = HeldSignals._innermost
    if holder is not None and threading.current_thread() is threading.main_thread():
        holder.raise_held()
