"""Ctrl-C where it can do no harm: what a signal's handler raises is kept until a safe place."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = tuple(signal.valid_signals())


class HeldSignals:
    """While it is entered, an exception of a signal handler is held instead of raised.

    Python raises KeyboardInterrupt between any two steps of the main thread, so no code could
    promise that something happens as a whole or not at all. Inside, every handler runs as ever
    and at once; only what it raises waits, and ``wake`` tells whoever waits to look at ``held``.
    Leaving raises what nobody has taken. In other threads, which get no signals, this does
    nothing.

    Attributes:
        held: what a handler has raised, the latest if there were several.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """Nothing is held yet.

        Args:
            wake: called after an exception was held; it may come at any point of the block.
        """
        self.held: BaseException | None = None
        self._wake = wake
        self._before: dict[int, Any] = {}
        self._own: Any = None

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in _SIGNALS}
            self._before = {n: handler for n, handler in handlers.items() if callable(handler)}
            self._own = self._hold  # one object: a bound method is a new one each time
            for number in self._before:
                signal.signal(number, self._own)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) is self._own:  # else a handler has put another one there
                signal.signal(number, handler)
        self._before, self._own = {}, None
        held = self.take()
        try:
            if held is not None:
                raise held
        finally:
            held = None  # or the exception and this frame would hold each other

    def take(self) -> BaseException | None:
        """What is held; it is the caller's to raise then."""
        held, self.held = self.held, None
        return held

    def _hold(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before[number](number, frame)
        except BaseException as error:
            self.held = error
            self._wake()
