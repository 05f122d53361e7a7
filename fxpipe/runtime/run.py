"""A run: a program on its way through the workers, which report to the caller.

``FlushedRun`` is that of one batch, all or nothing. That of batches without a flush between them
is in ``overlapping``.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import thread_time
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from fxpipe.errors import DeviceError, ExecutionError
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program, Turn
from fxpipe.runtime.devices.backend import Backend, Worker
from fxpipe.runtime.failure import Expected, explained, explained_late, given, whereabouts
from fxpipe.runtime.interpreter import Job, Machine, Stopped
from fxpipe.runtime.weights.live import LiveWeights, Weights
from fxpipe.signals import HeldSignals

GRACE = 0.5
"""Seconds that the devices get to leave their lists before a failure is raised regardless; a
device that is in the middle of an instruction ends it before it starts anything else."""

POLL = 0.1
"""Seconds after which the caller looks for signals: one that comes to another thread, or that
``_thread.interrupt_main`` imitates, does not end a wait."""

R = TypeVar("R")
W = TypeVar("W", bound=Weights)


class Driver:
    """One worker's share of a run.

    Attributes:
        machines: whom it drives.
        at: the one whose instruction is running, or has failed.
        busy: processor seconds of the thread in the last step.
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


class Finished(NamedTuple):
    """What a worker reports.

    Attributes:
        step: of this step, or batch.
        device: it has left its list, at the end, at a pause or because of an error. None: all
            outputs of the batch are with the caller.
        error: why it left its list before that.
    """

    step: int
    device: int | None = None
    error: BaseException | None = None


class Run(Generic[W]):
    """A program on its way through the workers.

    Attributes:
        program: what runs.
        machines: device → its machine.
        threads: how many workers there are: one for each device, or one for all.
        running: how many devices have not left what they were given.
        failed: whether it is over, as something failed or the caller was interrupted.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        workers: Sequence[Worker],
        backend: Backend,
        weights: W,
        *,
        first: int = 0,
        times: Sequence[list[Any]] = (),
        expected: Expected | None = None,
    ) -> None:
        """Nothing runs yet.

        Args:
            program: a verified program.
            plan: the plan that it was lowered from.
            workers: one for each device, or one for all.
            backend: what runs the devices' lists.
            weights: parameters and buffers.
            first: the number of the first step.
            times: device → gets the times of all instructions, see Machine; by default none.
            expected: what the devices are predicted to hold, for messages.
        """
        self.program = program
        self.threads = len(workers)
        self.running = 0
        self.failed = False
        self._workers = workers
        self._backend = backend
        self._weights = weights
        self._expected = expected
        self._jobs: dict[int, Job] = {}
        self._channels = backend.channels(program, len(workers))
        self.machines = [
            backend.machine(
                program, device, plan.stages, self._jobs, self._channels, weights, first
            )
            for device in range(program.devices)
        ]
        for machine, own in zip(self.machines, times, strict=False):
            machine.times = own
        if len(workers) == 1:
            self._drivers = [Driver(self.machines, program.turns)]
        else:
            ends = (len(own) for own in program.lists)
            self._drivers = [
                Driver([m], [(0, end)]) for m, end in zip(self.machines, ends, strict=True)
            ]
        self._reports: SimpleQueue[Finished | None] = SimpleQueue()

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
    def forked(self) -> bool:
        """Whether this is asked in another process, where there are no workers."""
        return self._workers[0].forked

    def check(self) -> None:
        """Raises InputError where a worker has ended, or is in another process."""
        for worker in self._workers:
            worker.check()

    def stop(self) -> bool:
        """Stop all devices. A running update is awaited, a computation only for GRACE.

        Returns:
            Whether all have left what they were given. One that has not drops its values when its
            thread comes to it.
        """
        self.failed = True
        updating = self._weights.stop()
        self._channels.stop()
        deadline = time.monotonic() + GRACE
        while self.running:
            try:
                report = self._hear(None if updating else max(deadline - time.monotonic(), 0))
            except Empty:
                return False
            if report is not None:
                self._note(report)
        return True

    def _held(self) -> HeldSignals:
        """Signals are held, and wake the caller that waits for reports."""
        return HeldSignals(wake=lambda: self._reports.put(None))

    def _start(self, step: int, work: Callable[[Driver], None]) -> None:
        """Let every worker do its share of a step; each device reports when it has left it.

        Raises InputError as ``check``; nothing has begun then.
        """
        self.check()
        for driver, worker in zip(self._drivers, self._workers, strict=True):
            worker.submit(functools.partial(self._drive, driver, step, work))
            self.running += len(driver.machines)

    def _drive(self, driver: Driver, step: int, work: Callable[[Driver], None]) -> None:
        """A worker's job."""
        try:
            if self._channels.stopping:
                raise Stopped
            work(driver)
            for machine in driver.machines:
                self._reports.put(Finished(step, machine.device))
        except BaseException as error:
            if not isinstance(error, Stopped):
                self._weights.stop()
                self._channels.stop()
            for machine in driver.machines:
                # no name for it here, or it and this frame would hold each other
                self._reports.put(
                    Finished(step, machine.device, error if machine is driver.at else Stopped())
                )

    def _hear(self, timeout: float | None) -> Finished | None:
        """The next report; None for a signal. Raises Empty where none comes in so many seconds."""
        report = self._reports.get(timeout=timeout)
        if report is not None and report.device is not None:
            self.running -= 1
        return report

    def _wait(self, signals: HeldSignals, done: Callable[[], bool]) -> None:
        """Take reports until something is so. Raises what failed before, or was held."""
        interrupt: BaseException | None = None
        try:
            while not done():
                try:
                    report = self._hear(POLL)
                except Empty:
                    self.check()
                    continue
                if report is None:
                    interrupt = signals.take()
                    if interrupt is not None:
                        places = "; ".join(map(whereabouts, self.machines))
                        interrupt.add_note(f"interrupted: {places}; {self._give_up()}")
                        raise interrupt
                elif report.error is None or isinstance(report.error, Stopped):
                    self._note(report)
                else:
                    raise self._failure(report) from report.error
        finally:
            interrupt = None  # or the exception and this frame would hold each other

    def _failure(self, report: Finished) -> ExecutionError:
        """The error for what an instruction raised; nothing runs any more."""
        cause, device = report.error, report.device
        assert cause is not None and device is not None
        machine = self.machines[device]
        position, step = machine.position, machine.step
        late = self._lost(cause, f"device {device} was given {given(machine)}", device)
        if late is not None:
            return late
        consequence = self._give_up()
        machine.position, machine.step = position, step
        return explained(machine, cause, consequence, self._backend, self._expected)

    def _lost(
        self, cause: BaseException, when: str, noticed: int | None = None
    ) -> DeviceError | None:
        """What a device reports late: then it need not let anything be put back."""
        late = explained_late(cause, when, self._backend, noticed)
        if late is not None:
            with suppress(Exception):
                self._give_up()
        return late

    def _give_up(self) -> str:
        """Stop all devices. Returns what that means for the weights, in words."""
        raise NotImplementedError

    def _note(self, report: Finished) -> None:
        """Take notice of a report."""


class FlushedRun(Run[LiveWeights]):
    """A run of one batch, which is through before another one begins.

    ``advance`` runs it to its end or its next pause and makes the results the model's. Until
    then nothing outside this object has changed, and after a failure nothing will.

    Attributes:
        committed: whether the last ``advance`` made its results the model's.
    """

    committed = False

    @property
    def alive(self) -> int:
        """Buffers that are alive on all devices."""
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
        """This is the batch."""
        self._jobs[0] = job

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
        with self._held() as signals:
            try:
                self._backend.begin()
                self._start(0, Driver.run)
                self._wait(signals, lambda: self.running == 0)
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
            self._clear(values=all(map(_at_end, self.machines)))
        return made

    def take_gradients(self) -> dict[str, Tensor]:
        """Hand over the sums of gradients, by name in the model, instead of to ``.grad``."""
        found = self._weights.named(self._gradients())
        for machine in self.machines:
            machine.store.gradients.clear()
        return found

    def _give_up(self) -> str:
        if self.stop():
            self._clear(values=True)
        return "the weights are as before the step"

    def _put_back(self, error: BaseException) -> None:
        """Make the weights what they were. A device that is lost need not let it."""
        if self.running and not self.failed:
            self._give_up()
        try:
            self._backend.end()  # updates may be on their way still
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
