"""Who drives machines: a thread for each, or one thread for all in turn."""

from __future__ import annotations

from collections.abc import Sequence
from time import thread_time

from fxpipe.ir.program import Turn
from fxpipe.runtime.interpreter import Machine


class Driver:
    """One thread's share of a run.

    Attributes:
        machines: whom it drives.
        at: the one whose instruction is running, or has failed.
        busy: processor seconds of the thread in the last run.
    """

    def __init__(self, machines: Sequence[Machine], turns: Sequence[Turn]) -> None:
        """Nothing is run yet.

        Args:
            machines: whom it drives.
            turns: which of them goes on, and how far; see ``Program.turns``.
        """
        self.machines = tuple(machines)
        self.at = self.machines[0]
        self.busy = 0.0
        self._turns = turns
        self._next = 0

    def run(self) -> None:
        """Bring all to the end of their lists or to their next pause. Raises as Machine.run."""
        if self._next == len(self._turns):  # another step
            self._next = 0
        start = thread_time()
        paused = 0
        while self._next < len(self._turns) and paused < len(self.machines):
            index, end = self._turns[self._next]
            self.at = self.machines[index]
            paused += not self.at.run(end)
            self._next += self.at.position == end
        self.busy = thread_time() - start


def drivers(machines: Sequence[Machine], threads: int) -> list[Driver]:
    """Thread → its share: one thread's is all machines, else each has its own.

    Args:
        machines: device → its machine.
        threads: how many there are: 1, or one a device.
    """
    program = machines[0].program
    if threads == 1:
        return [Driver(machines, program.turns)]
    return [Driver([m], [(0, len(program.lists[m.device]))]) for m in machines]
