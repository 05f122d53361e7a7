"""Who takes a program through a run: a machine for each device, and the workers that drive them."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

from fxpipe.errors import ExecutionError
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.runtime.clock import Clock
from fxpipe.runtime.devices.backend import Backend, Common
from fxpipe.runtime.devices.cpu import Worker
from fxpipe.runtime.driver import Driver, drivers
from fxpipe.runtime.failure import Expected, explained, whereabouts
from fxpipe.runtime.interpreter import Job, Stopped
from fxpipe.runtime.weights.live import LiveWeights
from fxpipe.runtime.weights.versions import VersionedWeights

GRACE = 0.5
"""Seconds that the devices get to leave their lists before a failure is raised regardless; a
device that is in the middle of an instruction ends it before it starts anything else."""

POLL = 0.1
"""Seconds after which the caller looks for signals: one that comes to another thread, or that
``_thread.interrupt_main`` imitates, does not end a wait."""


@dataclass(frozen=True)
class Setting:
    """What runs, and on what.

    Attributes:
        program: a verified program.
        plan: the plan that it was lowered from.
        workers: one for each device, or one for all.
        backend: what runs the devices' lists.
        clock: takes the time of every instruction, if given.
        expected: what the devices are predicted to hold, for messages.
    """

    program: Program
    plan: Plan
    workers: Sequence[Worker]
    backend: Backend
    clock: Clock | None = None
    expected: Expected | None = None


class Left(NamedTuple):
    """A device has left a step's list: at its end, at a pause, or because of an error."""

    device: int
    step: int
    error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether it left because of an error of its own."""
        return self.error is not None and not isinstance(self.error, Stopped)


class Landed(NamedTuple):
    """A batch's outputs are all with the caller."""

    batch: int


class Crew:
    """The machines of a run, and the workers, which report to the caller.

    Attributes:
        machines: device → its machine.
        running: how many devices have not left what they were given.
    """

    def __init__(
        self,
        setting: Setting,
        jobs: Mapping[int, Job],
        weights: LiveWeights | VersionedWeights,
        first: int = 0,
    ) -> None:
        """Nothing runs yet.

        Args:
            setting: what runs, and on what.
            jobs: batch → what it brings along.
            weights: parameters and buffers.
            first: the number of the first step.
        """
        program, backend = setting.program, setting.backend
        self._setting = setting
        self._weights = weights
        threads = len(setting.workers)
        self._wires = backend.wires(program, threads)
        common = Common(program, setting.plan.stages, jobs, weights)
        self.machines = [
            backend.machine(self._wires, device, common, first) for device in range(program.devices)
        ]
        self._drivers = drivers(self.machines, threads)
        if setting.clock is not None:
            setting.clock.watch(self.machines)
        self._reports: SimpleQueue[Left | Landed | None] = SimpleQueue()
        self.running = 0

    @property
    def peak_kept(self) -> Counter[int]:
        """Stage → the most micro-batches whose saved values were alive at once."""
        peaks = (Counter(dict(machine.store.peak)) for machine in self.machines)
        return sum(peaks, Counter())

    @property
    def busy(self) -> float:
        """Processor seconds of all workers in the last step that they have run."""
        return sum(driver.busy for driver in self._drivers)

    @property
    def whereabouts(self) -> str:
        """Where each device is, in words."""
        return "; ".join(map(whereabouts, self.machines))

    @property
    def forked(self) -> bool:
        """Whether this is asked in another process, where there are no workers."""
        return self._setting.workers[0].forked

    def check(self) -> None:
        """Raises InputError where a worker has ended, or is in another process."""
        for worker in self._setting.workers:
            worker.check()

    def start(self, step: int, work: Callable[[Driver], None]) -> None:
        """Let every worker do its share of a step; each device reports when it has left it.

        Raises InputError as ``check``; nothing has begun then.
        """
        self.check()
        for driver, worker in zip(self._drivers, self._setting.workers, strict=True):
            worker.submit(functools.partial(self._drive, driver, step, work))
            self.running += len(driver.machines)

    def _drive(self, driver: Driver, step: int, work: Callable[[Driver], None]) -> None:
        """A worker's job."""
        try:
            if self._wires.stopping:
                raise Stopped
            work(driver)
            for machine in driver.machines:
                self._reports.put(Left(machine.device, step))
        except BaseException as error:
            if not isinstance(error, Stopped):
                self._weights.stop()
                self._wires.stop()
            for machine in driver.machines:
                # no name for it here, or it and this frame would hold each other
                self._reports.put(
                    Left(machine.device, step, error if machine is driver.at else Stopped())
                )

    def tell(self, report: Landed | None) -> None:
        """Report something else to the caller; None wakes it."""
        self._reports.put(report)

    def hear(self, timeout: float | None = POLL) -> Left | Landed | None:
        """The next report. Raises Empty where none comes within so many seconds."""
        report = self._reports.get(timeout=timeout)
        if isinstance(report, Left):
            self.running -= 1
        return report

    def stop(self, note: Callable[[Left | Landed], None] = lambda report: None) -> bool:
        """Stop all devices. A running update is awaited, a computation only for GRACE.

        Args:
            note: is told what the devices report until then.

        Returns:
            Whether all have left what they were given. One that has not drops its values when its
            thread comes to it.
        """
        updating = self._weights.stop()
        self._wires.stop()
        deadline = time.monotonic() + GRACE
        while self.running:
            try:
                report = self.hear(None if updating else max(deadline - time.monotonic(), 0))
            except Empty:
                return False
            if report is not None:
                note(report)
        return True

    def explained(self, device: int, cause: BaseException, consequence: str) -> ExecutionError:
        """The error for what the instruction raised that a device is at; see ``failure``."""
        setting = self._setting
        return explained(
            self.machines[device], cause, consequence, setting.backend, setting.expected
        )
