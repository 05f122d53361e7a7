"""What a worker's thread does in a run: it runs its devices' lists, and reports."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from fxpipe.ir.program import Turn
from fxpipe.runtime.failure import explained_failure
from fxpipe.runtime.interpreter import Machine, Stopped

if TYPE_CHECKING:
    from fxpipe.runtime.backend import Backend


class Finished(NamedTuple):
    """A worker's report.

    Attributes:
        step: the number of the step, or of the batch.
        device: the device that has left its list: at the end, at a pause or because of an error.
            None if the report says that the caller has all outputs of the batch, or, with an
            error, that another process has stopped the run.
        error: the error, if there was one.
    """

    step: int
    device: int | None = None
    error: BaseException | None = None


class Driver:
    """One worker's part of a run.

    Attributes:
        machines: the machines that it runs, which share channels and weights.
        at: the machine whose instruction is running, or has failed.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        turns: Sequence[Turn],
        backend: Backend,
        reports: SimpleQueue[Finished | None],
    ) -> None:
        """Prepare to run; ``turns`` says which machine runs next and up to where, see
        ``Program.turns``."""
        self.machines = tuple(machines)
        self.at = self.machines[0]
        self._channels, self._weights = self.at.channels, self.at.weights
        self._turns = turns
        self._next = 0
        self._backend = backend
        self._reports = reports

    def run(self, step: int, batches: range | None = None) -> None:
        """Run all lists to their ends or their next pauses, and report for each device. With
        ``batches``, each list begins anew, for the step of this number. Raises nothing."""
        try:
            if self._channels.stopping:
                raise Stopped
            if batches is not None:
                for machine in self.machines:
                    machine.begin(step, batches)
            if self._next == len(self._turns):  # another step
                self._next = 0
            paused = 0
            while self._next < len(self._turns) and paused < len(self.machines):
                index, end = self._turns[self._next]
                self.at = self.machines[index]
                paused += not self.at.run(end)
                self._next += self.at.position == end
            self._channels.flush()
            pools = self._backend.group.replicas > 1
            for machine in self.machines:
                if machine.store.state and (pools or self._weights.gathers):
                    self._gather(machine, pools)
            for machine in self.machines:
                self._reports.put(Finished(step, machine.device))
        except BaseException as error:
            self._fail(step, error)

    def _gather(self, machine: Machine, pools: bool) -> None:
        """Combine the buffers that a device's forwards have written, also those of all replicas."""
        written = machine.store.state
        with self._backend.computing(machine.device):
            if pools:
                written = self._channels.replicas.pool(written, self._weights.deferred)
            machine.store.state = self._weights.gathered(written)

    def _fail(self, step: int, error: BaseException) -> None:
        """Stop the other devices, and report."""
        if not isinstance(error, Stopped):
            self._weights.stop()
            self._channels.stop()
        for machine in self.machines:
            # not bound to a name: the exception and this frame would refer to each other
            self._reports.put(
                Finished(step, machine.device, error if machine is self.at else Stopped())
            )
        if not isinstance(error, Stopped):
            # Explained only if another process is told: the caller may have raised the error by
            # now, and while this thread works on it the error keeps the step's tensors alive.
            self._channels.left(partial(explained_failure, self.at, error, ""))
