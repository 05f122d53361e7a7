"""The run of one batch, completely or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from fxpipe.errors import DeviceError
from fxpipe.runtime.failure import explained_late
from fxpipe.runtime.interpreter import Job, Machine
from fxpipe.runtime.run import Driver, Run
from fxpipe.runtime.weights.live import LiveWeights

R = TypeVar("R")


class FlushedRun(Run[LiveWeights]):
    """A run of one batch, which is finished before another one begins.

    ``advance`` runs it to its end or its next pause and commits the results to the model. Before
    the commit nothing outside this object changes, and after a failure there is no commit.

    Attributes:
        committed: whether the last ``advance`` committed its results.
    """

    committed = False

    @property
    def alive(self) -> int:
        """How many buffers are alive on all devices together."""
        return sum(len(machine.store.values) for machine in self.machines)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Name in the model → each parameter that the program reads."""
        return self._weights.by_name

    @property
    def constants(self) -> list[Tensor]:
        """The buffers that the program reads and does not write."""
        return self._weights.constants

    def feed(self, job: Job) -> None:
        """Set the batch to run."""
        self._jobs[0] = job
        self._channels.fed(0)

    def advance(self, result: Callable[[], R]) -> R:
        """Run every device to the end of its list or its next pause, and commit.

        Args:
            result: makes the value to return; called before the commit, so that nothing has changed
                if it raises.

        Raises:
            ExecutionError: an instruction raised; all devices have been stopped, and the weights
                are as before.
            KeyboardInterrupt: or another exception of a signal handler; its note says where the
                devices were, and whether the weights are as before or as after.
        """
        self.committed = False
        with self._held() as signals:
            try:
                self._backend.begin()
                self._start(0, Driver.run)
                self._wait(signals, lambda: self.running == 0)
                self._backend.end()
                self._settle()
                made = result()
                self._weights.commit(self._written(), self._gradients())
            except BaseException as error:
                late = explained_late(error, "a step began or ended", self._backend)
                self._put_back(late or error)
                if late is not None:
                    raise late from error
                raise
            self.committed = True
            self._backend.kept()
            self._channels.pause()
            if signals.held is not None:
                signals.held.add_note("interrupted after the step, whose results are kept")
            self._clear(values=all(map(_at_end, self.machines)))
        return made

    def take_gradients(self) -> dict[str, Tensor]:
        """Return the summed gradients by name in the model, so that ``.grad`` does not get them."""
        found = self._weights.named(self._gradients())
        for machine in self.machines:
            machine.store.gradients.clear()
        return found

    def _give_up(self) -> str:
        if self.stop():
            self._clear(values=True)
        return "the weights are as before the step"

    def _put_back(self, error: BaseException) -> None:
        """Roll the weights back. It may fail silently where a device is lost."""
        if self.running and not self.failed:
            self._give_up()
        try:
            self._backend.end()  # updates that were launched may still run
            self._weights.roll_back()
        except Exception:
            if not isinstance(error, DeviceError):
                raise

    def _clear(self, values: bool) -> None:
        for machine in self.machines:
            machine.store.state.clear()
            machine.store.gradients.clear()
            if values:
                machine.store.values.clear()

    def _written(self) -> dict[str, Tensor]:
        return {name: value for m in self.machines for name, value in m.store.state.items()}

    def _gradients(self) -> dict[int, list[Tensor | None]]:
        return {s: g for m in self.machines for (s, _), g in m.store.gradients.items()}


def _at_end(machine: Machine) -> bool:
    return machine.position == len(machine.program.lists[machine.device])
