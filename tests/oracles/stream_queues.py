"""What works off the queues of streams: threads with delays, or one thread in a drawn order.

Threads run beside each other as a device's streams do, and what they show depends on the machine.
A drawn order does one piece of work at a time, and depends on nothing but its seed.
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
        """Let a stream do something once it is through with all before, and events are there."""
        ...

    def linger(self, seconds: float) -> None:
        """Take so long, in the middle of some work."""
        ...

    def finish(self) -> None:
        """Work off everything.

        Raises:
            WrongOrder: some work waits for what never comes.
        """
        ...


class Threads:
    """Each stream has a thread, and is as slow as is drawn for it."""

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
"""Threads that no run uses; one is started once."""


class Drawn:
    """One thread does the work of all streams, of which some lag far behind the others."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._queues: dict[Place, deque[tuple[Sequence[threading.Event], Work]]] = {}
        self._weights: dict[Place, float] = {}

    def give(self, place: Place, waits: Sequence[threading.Event], work: Work) -> None:
        """See Queues.give. Some of what is ready is done at once."""
        if place not in self._queues:
            self._queues[place] = deque()
            self._weights[place] = self._dice.choice([1.0, 1.0, 0.1, 0.01])
        self._queues[place].append((waits, work))
        for _ in range(self._dice.choice([0, 0, 1, 3])):
            self._do_one()

    def linger(self, seconds: float) -> None:
        """See Queues.linger: there is nobody to wait for."""

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
