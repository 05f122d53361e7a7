"""Who drives machines: a thread for each, or one thread for all in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fxpipe.program import Pause
from fxpipe.runtime.interpreter import Machine
from fxpipe.runtime.launching import LaunchingMachine


class Driver(Protocol):
    """One thread's share of a run.

    Attributes:
        machines: whom it drives.
        at: the one whose instruction is running, or has failed.
    """

    @property
    def machines(self) -> Sequence[Machine]: ...

    @property
    def at(self) -> Machine: ...

    def run(self) -> None:
        """Bring all to the end of their lists or to their next pause. Raises as Machine.run."""
        ...


class Alone:
    """A thread with one machine. See Driver."""

    def __init__(self, machine: Machine) -> None:
        self.at = machine
        self.machines = (machine,)

    def run(self) -> None:
        """See Driver.run."""
        self.at.run()


class InTurn:
    """A thread that launches for several machines. See Driver."""

    def __init__(self, machines: Sequence[LaunchingMachine], order: Sequence[int]) -> None:
        """Nothing is launched yet.

        Args:
            machines: device → its machine.
            order: the device of each launch; see ``dispatch_order``.
        """
        self.machines = tuple(machines)
        self.at = self.machines[0]
        self._order = order
        self._next = 0

    def run(self) -> None:
        """See Driver.run."""
        if self._next == len(self._order):  # another step
            self._next = 0
        paused = 0
        while self._next < len(self._order) and paused < len(self.machines):
            self.at = self.machines[self._order[self._next]]
            paused += type(self.at.launch_next()) is Pause
            self._next += 1
