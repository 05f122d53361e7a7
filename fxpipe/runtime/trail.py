"""What a device was given and what of it is known to be done: whom to suspect when it fails late.

A device reports an error of its own when it is asked the next time, whatever it is asked, and
from then on tells nothing more. So it is asked while instructions are launched what is done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from fxpipe.ir.program import Instruction


class Given(NamedTuple):
    """An instruction that a device was given.

    Attributes:
        position: its index in the device's list.
        instruction: the instruction.
        step: the step that it was given in.
    """

    position: int
    instruction: Instruction
    step: int


class Unfinished(NamedTuple):
    """What one stream may still be at.

    Attributes:
        device: of the program.
        place: what the device is called, such as ``cuda:1``.
        stream: the stream's name in programs.
        done: the last instruction that was seen to be done, or None.
        since: those that it was given later, in order.
    """

    device: int
    place: str
    stream: str
    done: Given | None
    since: tuple[Given, ...]


class _Stream:
    """Attributes: done and open as in Unfinished; marked: the marks that are not reached yet, and
    how many of the open ones each comes behind."""

    def __init__(self) -> None:
        self.done: Given | None = None
        self.open: deque[Given] = deque()
        self.marked: deque[tuple[Any, int]] = deque()
        self.passed = 0


class Trail:
    """One device's streams, from run to run. Several threads may use it."""

    def __init__(self, device: int, place: str) -> None:
        """Nothing was given yet.

        Args:
            device: its index in the program.
            place: what messages call it.
        """
        self._device, self._place = device, place
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()

    def give(self, stream: str, given: Given) -> None:
        """A stream is about to be given an instruction."""
        with self._lock:
            if stream not in self._streams:
                self._streams[stream] = _Stream()
            self._streams[stream].open.append(given)

    def mark(self, stream: str, mark: Any) -> None:
        """A mark stands behind all that a stream was given so far."""
        with self._lock:
            if stream in self._streams:
                own = self._streams[stream]
                own.marked.append((mark, own.passed + len(own.open)))

    def look(self, stream: str, reached: Callable[[Any], bool]) -> None:
        """See how far a stream is.

        Args:
            stream: its name.
            reached: whether a mark is; it raises what the device has to report.
        """
        with self._lock:
            own = self._streams.get(stream)
            while own is not None and own.marked and reached(own.marked[0][0]):
                _, count = own.marked.popleft()
                while own.passed < count:
                    own.done = own.open.popleft()
                    own.passed += 1

    def unfinished(self, reached: Callable[[Any], bool]) -> list[Unfinished]:
        """The streams that may still be at something.

        Args:
            reached: as for ``look``; a device that has failed may tell nothing any more.
        """
        for name in tuple(self._streams):
            with suppress(RuntimeError):
                self.look(name, reached)
        with self._lock:
            return [
                Unfinished(self._device, self._place, name, own.done, tuple(own.open))
                for name, own in self._streams.items()
                if own.open
            ]
