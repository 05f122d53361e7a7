"""One run of a program on the workers: start, pause, finish or fail, and all or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from queue import Empty
from typing import TypeVar

from torch import Tensor

from fxpipe.errors import DeviceError
from fxpipe.kernels.kernel import Kernel
from fxpipe.runtime.failure import explained_late
from fxpipe.runtime.interpreter import Host, Job, Machine
from fxpipe.runtime.run import Crew, Left, Setting
from fxpipe.runtime.weights.clipping import Clipping
from fxpipe.runtime.weights.live import LiveWeights
from fxpipe.signals import HeldSignals

R = TypeVar("R")


class Execution:
    """A program on its way through the workers.

    ``advance`` runs it to its end or its next pause and makes the results the model's. Until
    then nothing outside this object has changed, and after a failure nothing will.

    Attributes:
        committed: whether the last ``advance`` made its results the model's.
    """

    def __init__(
        self,
        setting: Setting,
        kernels: Sequence[Sequence[Kernel]],
        host: Host,
        weights: LiveWeights,
        *,
        clipping: Clipping | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            setting: the program, and what runs it.
            kernels: micro-batch → stage → what runs it.
            host: the caller's side.
            weights: parameters, buffers and optimizers.
            clipping: how gradients are clipped, if the program clips.
        """
        self.committed = False
        self._backend = setting.backend
        self._weights = weights
        self._crew = Crew(setting, {0: Job(kernels, host, clipping)}, weights)

    @property
    def peak_kept(self) -> Counter[int]:
        """Stage → the most micro-batches whose saved values were alive at once."""
        return self._crew.peak_kept

    @property
    def busy(self) -> float:
        """Processor seconds of the workers in the last ``advance``."""
        return self._crew.busy

    @property
    def alive(self) -> int:
        """Buffers that are alive on all devices."""
        return sum(len(machine.store.values) for machine in self._crew.machines)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Name in the model → each parameter that the program reads."""
        return self._weights.by_name

    @property
    def constants(self) -> list[Tensor]:
        """The buffers that the program reads and does not write."""
        return self._weights.constants

    def advance(self, result: Callable[[], R]) -> R:
        """Run every device to the end of its list or its next pause, and commit.

        Args:
            result: makes what the caller wants of it; called before anything is the model's, so
                that nothing has happened if it raises.

        Raises:
            ExecutionError: an instruction raised; all devices have been stopped, and the weights
                are as before.
            KeyboardInterrupt: or what else a signal's handler raises; its note says where the
                devices were, and whether the weights are as before or as after.
        """
        self.committed = False
        with HeldSignals(wake=lambda: self._crew.tell(None)) as signals:
            try:
                self._backend.begin()
                self._run(signals)
                self._backend.end()
                made = result()
                self._weights.commit(self._written(), self._gradients())
            except BaseException as error:
                late = explained_late(error, "a step began or ended", self._backend)
                self._put_back(late or error)
                if late is not None:
                    raise late from error
                raise
            self.committed = True
            if signals.held is not None:
                signals.held.add_note("interrupted after the step, whose results are kept")
            self._clear(values=all(map(_at_end, self._crew.machines)))
        return made

    def take_gradients(self) -> dict[str, Tensor]:
        """Hand over the sums of gradients, by name in the model, instead of to ``.grad``."""
        found = self._weights.named(self._gradients())
        for machine in self._crew.machines:
            machine.store.gradients.clear()
        return found

    def _run(self, signals: HeldSignals) -> None:
        """Run the devices. When this raises, none of them will do anything more."""
        crew = self._crew
        failure: Left | None = None
        interrupt: BaseException | None = None
        try:
            crew.start(0, lambda driver: driver.run())
            while crew.running and failure is None and interrupt is None:
                try:
                    report = crew.hear()
                except Empty:
                    crew.check()
                    continue
                if report is None:
                    interrupt = signals.take()
                elif isinstance(report, Left) and report.failed:
                    failure = report
            if interrupt is not None:
                interrupt.add_note(
                    f"interrupted a step, the weights are as before it: {crew.whereabouts}"
                )
                raise interrupt
            if failure is not None and failure.error is not None:
                raise crew.explained(
                    failure.device, failure.error, "the weights are as before the step"
                ) from failure.error
        except BaseException:
            if crew.stop():
                self._clear(values=True)
            raise
        finally:
            interrupt = None  # or the exception and this frame would hold each other

    def _put_back(self, error: BaseException) -> None:
        """Make the weights what they were. A device that is lost need not let it."""
        try:
            self._backend.end()  # updates may be on their way still
            self._weights.roll_back()
        except Exception:
            if not isinstance(error, DeviceError):
                raise

    def _clear(self, values: bool) -> None:
        for machine in self._crew.machines:
            machine.store.state.clear()
            machine.store.gradients.clear()
            if values:
                machine.store.values.clear()

    def _written(self) -> dict[str, Tensor]:
        return {name: value for m in self._crew.machines for name, value in m.store.state.items()}

    def _gradients(self) -> dict[int, list[Tensor | None]]:
        return {s: g for m in self._crew.machines for (s, _), g in m.store.gradients.items()}


def _at_end(machine: Machine) -> bool:
    return machine.position == len(machine.program.lists[machine.device])
