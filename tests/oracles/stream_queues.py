"""Workers for the queues of streams: threads with delays, or one thread in a random order.

Threads run concurrently as a device's streams do, so their results depend on the machine. The
random order runs one piece of work at a time and depends only on its seed.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

import torch

PATIENCE = 60.0
Work = Callable[[], None]
Place = tuple[int, str]
"""A device, and the name of a stream."""


class WrongOrder(Exception):
    """An instruction failed or hung."""


class Queues(Protocol):
    """The streams of all devices."""

    def give(self, place: Place, waits: Sequence[threading.Event], work: Work) -> None:
        """Queue work on a stream, to run after its earlier work and the events ``waits``."""
        ...

    def linger(self, seconds: float) -> None:
        """Sleep in the middle of some work."""
        ...

    def finish(self) -> None:
        """Run all queued work.

        Raises:
            WrongOrder: some work waits for ever.
        """
        ...


class Threads:
    """A thread for each stream, with a random speed."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._streams: dict[Place, _Thread] = {}
        self._speeds: dict[Place, float] = {}
        self._errors: list[WrongOrder] = []

    def give(self, place: Place, waits: Sequence[threading.Event], work: Work) -> None:
        """See Queues.give."""
        if place not in self._streams:
            self._streams[place] = _spare.pop() if _spare else _Thread()
            self._speeds[place] = self._dice.choice([0.0, 0.0, 0.0003, 0.002])
        delay = self._dice.random() * self._speeds[place]

        def do() -> None:
            if all(event.wait(PATIENCE) for event in waits):
                self.linger(delay)
                work()
            else:
                self._errors.append(WrongOrder("an event is not recorded"))

        self._streams[place].queue.put(do)

    def linger(self, seconds: float) -> None:
        """See Queues.linger."""
        if seconds:
            time.sleep(seconds)

    def finish(self) -> None:
        """See Queues.finish."""
        try:
            for stream in self._streams.values():
                through = threading.Event()
                stream.queue.put(through.set)
                if not through.wait(PATIENCE):
                    raise WrongOrder("a stream hangs")
            if self._errors:
                raise self._errors[0]
        finally:
            _spare.extend(self._streams.values())


class _Thread:
    def __init__(self) -> None:
        self.queue: SimpleQueue[Work | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        torch.set_num_threads(1)
        with torch.no_grad():
            while (work := self.queue.get()) is not None:
                work()
                del work


_spare: list[_Thread] = []
"""Idle threads for later runs to reuse."""


class Drawn:
    """One thread for the work of all streams, some of which lag far behind the others."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._queues: dict[Place, deque[tuple[Sequence[threading.Event], Work]]] = {}
        self._weights: dict[Place, float] = {}

    def give(self, place: Place, waits: Sequence[threading.Event], work: Work) -> None:
        """See Queues.give. Runs some of the ready work at once."""
        if place not in self._queues:
            self._queues[place] = deque()
            self._weights[place] = self._dice.choice([1.0, 1.0, 0.1, 0.01])
        self._queues[place].append((waits, work))
        for _ in range(self._dice.choice([0, 0, 1, 3])):
            self._do_one()

    def linger(self, seconds: float) -> None:
        """Do nothing: no other thread runs meanwhile."""

    def finish(self) -> None:
        """See Queues.finish."""
        while self._do_one():
            pass
        if any(self._queues.values()):
            raise WrongOrder("an event is not recorded")

    def _do_one(self) -> bool:
        ready = [
            place
            for place, queue in self._queues.items()
            if queue and all(event.is_set() for event in queue[0][0])
        ]
        if not ready:
            return False
        weights = [self._weights[place] for place in ready]
        (place,) = self._dice.choices(ready, weights)
        _, work = self._queues[place].popleft()
        work()
        return True
