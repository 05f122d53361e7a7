"""One run of a program on the workers: start, pause, finish or fail, and all or nothing."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from torch import Tensor

from fxpipe.errors import DeviceError
from fxpipe.kernels.kernel import Kernel
from fxpipe.plan import Plan
from fxpipe.program import Program
from fxpipe.runtime.backend import Backend, Common
from fxpipe.runtime.clipping import Clipping
from fxpipe.runtime.clock import Clock
from fxpipe.runtime.cpu import Worker
from fxpipe.runtime.driver import Driver
from fxpipe.runtime.failure import Expected, explained, explained_late, whereabouts
from fxpipe.runtime.interpreter import Host, Job, Machine, Stopped
from fxpipe.runtime.weights import LiveWeights
from fxpipe.signals import HeldSignals

GRACE = 0.5
"""Seconds that the devices get to leave their lists before a failure is raised regardless; a
device that is in the middle of an instruction ends it before it starts anything else."""

POLL = 0.1
"""Seconds after which the caller looks for signals: one that comes to another thread, or that
``_thread.interrupt_main`` imitates, does not end a wait."""

_ORDER = threading.Lock()
"""Held while a run is handed to the workers: two runs reach all workers in the same order, or
each could wait for a device that the other holds."""

R = TypeVar("R")


class Report(NamedTuple):
    """A device has left its list: at its end, at a pause, or because of an error."""

    device: int
    error: BaseException | None = None


class Execution:
    """A program on its way through the workers.

    ``advance`` runs it to its end or its next pause and makes the results the model's. Until
    then nothing outside this object has changed, and after a failure nothing will.

    Attributes:
        committed: whether the last ``advance`` made its results the model's.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        kernels: Sequence[Sequence[Kernel]],
        host: Host,
        weights: LiveWeights,
        workers: Sequence[Worker],
        *,
        clipping: Clipping | None = None,
        clock: Clock | None = None,
        backend: Backend,
        expected: Expected | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            program: a verified program.
            plan: the plan that it was lowered from.
            kernels: micro-batch → stage → what runs it.
            host: the caller's side.
            weights: parameters, buffers and optimizers.
            workers: one for each thread of the backend.
            clipping: how gradients are clipped, if the program clips.
            clock: takes the time of every instruction, if given.
            backend: what runs the devices' lists.
            expected: what the devices are predicted to hold, for messages.
        """
        self._backend = backend
        self._expected = expected
        self.committed = False
        self._workers = workers
        self._weights = weights
        self._wires = backend.wires(program)
        common = Common(program, plan.stages, {0: Job(kernels, host, clipping)}, weights)
        self._machines = [
            backend.machine(self._wires, device, common, 0) for device in range(program.devices)
        ]
        self._drivers = backend.drivers(self._machines)
        if clock is not None:
            clock.watch(self._machines)
        # None wakes the caller
        self._reports: SimpleQueue[Report | None] = SimpleQueue()

    @property
    def peak_kept(self) -> Counter[int]:
        """Stage → the most micro-batches whose saved values were alive at once."""
        return sum((machine.store.peak for machine in self._machines), Counter())

    @property
    def alive(self) -> int:
        """Buffers that are alive on all devices."""
        return sum(len(machine.store.values) for machine in self._machines)

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
        with HeldSignals(wake=lambda: self._reports.put(None)) as signals:
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
            self._clear(values=all(map(_at_end, self._machines)))
        return made

    def take_gradients(self) -> dict[str, Tensor]:
        """Hand over the sums of gradients, by name in the model, instead of to ``.grad``."""
        found = self._weights.named(self._gradients())
        for machine in self._machines:
            machine.store.gradients.clear()
        return found

    def _run(self, signals: HeldSignals) -> None:
        """Run the devices. When this raises, none of them will do anything more."""
        failure: Report | None = None
        interrupt: BaseException | None = None
        waiting = 0
        try:
            with _ORDER:
                for driver, worker in zip(self._drivers, self._workers, strict=True):
                    worker.submit(functools.partial(self._drive, driver))
                    waiting += len(driver.machines)
            while waiting and failure is None and interrupt is None:
                try:
                    report = self._reports.get(timeout=POLL)
                except Empty:
                    continue
                if report is None:
                    interrupt = signals.take()
                    continue
                waiting -= 1
                if report.error is not None and not isinstance(report.error, Stopped):
                    failure = report
            if interrupt is not None:
                places = "; ".join(map(whereabouts, self._machines))
                interrupt.add_note(f"interrupted a step, the weights are as before it: {places}")
                raise interrupt
            if failure is not None and failure.error is not None:
                raise explained(
                    self._machines[failure.device],
                    failure.error,
                    "the weights are as before the step",
                    self._backend,
                    self._expected,
                ) from failure.error
        except BaseException:
            self._stop(waiting)
            raise
        finally:
            interrupt = None  # or the exception and this frame would hold each other

    def _drive(self, driver: Driver) -> None:
        """A worker's job: run its devices and report."""
        try:
            driver.run()
            for machine in driver.machines:
                self._reports.put(Report(machine.device))
        except BaseException as error:
            if not isinstance(error, Stopped):
                self._weights.stop()
                self._wires.stop()
            for machine in driver.machines:
                # no name for it here, or it and this frame would hold each other
                self._reports.put(
                    Report(machine.device, error if machine is driver.at else Stopped())
                )

    def _put_back(self, error: BaseException) -> None:
        """Make the weights what they were. A device that is lost need not let it."""
        try:
            self._weights.roll_back()
        except Exception:
            if not isinstance(error, DeviceError):
                raise

    def _stop(self, waiting: int) -> None:
        """Stop all devices. A running update is awaited, a computation only for GRACE."""
        updating = self._weights.stop()
        self._wires.stop()
        deadline = time.monotonic() + GRACE
        while waiting:
            try:
                timeout = None if updating else max(deadline - time.monotonic(), 0)
                waiting -= self._reports.get(timeout=timeout) is not None
            except Empty:
                return  # it drops its values when its thread comes to it
        self._clear(values=True)

    def _clear(self, values: bool) -> None:
        for machine in self._machines:
            machine.store.state.clear()
            machine.store.gradients.clear()
            if values:
                machine.store.values.clear()

    def _written(self) -> dict[str, Tensor]:
        return {name: value for m in self._machines for name, value in m.store.state.items()}

    def _gradients(self) -> dict[int, list[Tensor | None]]:
        return {s: g for m in self._machines for (s, _), g in m.store.gradients.items()}


def _at_end(machine: Machine) -> bool:
    return machine.position == len(machine.program.lists[machine.device])
