"""When the instructions of some steps run, on all devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fxpipe.runtime.interpreter import Machine


class Clock:
    """Start and end of every instruction of some steps.

    Attributes:
        times: device → start and end of its first instruction, of its second, and so on; the
            backend turns them into nanoseconds of one clock.
    """

    def __init__(self, devices: int) -> None:
        self.times: tuple[list[Any], ...] = tuple([] for _ in range(devices))

    def watch(self, machines: Iterable[Machine]) -> None:
        """Take the time of what these devices run."""
        for machine in machines:
            machine.times = self.times[machine.device]
