"""Who takes a program through a run: a machine for each device, and the workers that drive them."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import thread_time
from typing import Any, NamedTuple

from fxpipe.errors import ExecutionError
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program, Turn
from fxpipe.runtime.devices.backend import Backend, Common
from fxpipe.runtime.devices.cpu import Worker
from fxpipe.runtime.failure import Expected, explained, whereabouts
from fxpipe.runtime.interpreter import Job, Machine, Stopped
from fxpipe.runtime.weights.live import LiveWeights
from fxpipe.runtime.weights.versions import VersionedWeights


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
