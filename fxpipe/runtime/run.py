"""A run executes a program on the worker threads, which report to the caller.

``FlushedRun`` runs one batch, completely or not at all. The extension ``overlapping`` runs batches
without a flush between them.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from torch import Tensor

from fxpipe.errors import RESTORE, DeviceError, ExecutionError, told
from fxpipe.formatting import stages_text
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program
from fxpipe.runtime.backend import Backend, Worker
from fxpipe.runtime.driver import Driver, Finished
from fxpipe.runtime.failure import explained_failure, running, whereabouts
from fxpipe.runtime.host import Job
from fxpipe.runtime.interpreter import Stopped
from fxpipe.runtime.weights.live import LiveWeights, Weights
from fxpipe.signals import HeldSignals

GRACE = 0.5
"""Seconds to wait for the devices to leave their lists before a failure is raised anyway. A device
in the middle of an instruction finishes it, and starts nothing else."""

POLL = 0.1
"""Seconds after which a waiting caller checks for signals: a signal sent to another thread, or by
``_thread.interrupt_main``, does not end a wait."""

R = TypeVar("R")
W = TypeVar("W", bound=Weights)


class BatchRun(Generic[W]):
    """One execution of a program on the workers.

    Attributes:
        program: the program that runs.
        machines: the machines of the devices that this process runs, in order.
        weights: parameters and buffers.
        threads: how many workers there are: one for each of these devices, or one for all.
        running: how many devices have not left their submitted lists yet.
        failed: whether the run is over because of a failure or an interrupt.
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
        ended: Callable[[str], None] = lambda why: None,
    ) -> None:
        """Make the machines and channels; nothing runs yet.

        There is one worker for each device that this process runs, or one for all. ``first`` is the
        number of the first step. ``times`` has for each device the list that gets the times of its
        instructions, see Machine. ``ended`` is called with the reason if a failure leaves the
        stages at different updates.
        """
        self.program = program
        self.threads = len(workers)
        self.running = 0
        self.failed = False
        self._workers = workers
        self._backend = backend
        self._group = backend.group
        self.weights = weights
        self._ended = ended
        self._jobs: dict[int, Job] = {}
        self._elsewhere = Counter[int]()
        self._channels = backend.channels(program, len(workers), self._jobs)
        self.machines = [
            backend.machine(device, first)(
                program=program,
                stages=plan.stages,
                jobs=self._jobs,
                channels=self._channels,
                weights=weights,
                times=times[device] if times else None,
            )
            for device in backend.devices(program)
        ]
        # with self in a function of the channels, run and channels would be a cycle
        self._reports = reports = SimpleQueue[Finished | None]()
        if len(workers) < len(self.machines):
            self._drivers = [Driver(self.machines, program.turns, backend, reports)]
        else:
            self._drivers = [
                Driver([m], [(0, len(program.lists[m.device]))], backend, reports)
                for m in self.machines
            ]
        self._channels.when_failed(lambda error: reports.put(Finished(-1, None, error)))

    @property
    def peak_kept(self) -> Counter[int]:
        """Stage → the most micro-batches whose saved values were alive at once on a device."""
        peaks = +self._elsewhere
        for machine in self.machines:
            peaks |= Counter(dict(machine.store.peak))
        return peaks

    def _settle(self) -> None:
        """Wait until every process has finished its lists. Signals do not interrupt the wait, as
        other processes may commit from here on. Raises RankError where one of them has failed."""
        if self._group.size > 1:
            others = self._group.settle(dict(self.peak_kept))
            self._elsewhere = sum(map(Counter, others), Counter[int]())

    def check(self) -> None:
        """Check the workers. Raises InputError if one has ended, or is in another process."""
        for worker in self._workers:
            worker.check()

    def stop(self) -> bool:
        """Stop all devices. Waits for a running update; for a computation at most GRACE seconds.

        Returns:
            Whether all devices have left their lists. A device that has not drops its values later.
        """
        self.failed = True
        updating = self.weights.stop()
        self._channels.stop()
        deadline = time.monotonic() + GRACE
        while self.running:
            try:
                report = self._hear(None if updating else max(deadline - time.monotonic(), 0))
            except Empty:
                return False
            if report is not None and (report.device is not None or report.error is None):
                self._note(report)
        return True

    def _held(self) -> HeldSignals:
        """Hold signals inside a block; a signal wakes the caller that waits for reports."""
        return HeldSignals(wake=lambda: self._reports.put(None))

    def _start(self, step: int, batches: range | None = None) -> None:
        """Submit a step to every worker, see ``Driver.run``. Raises InputError like ``check``."""
        self._channels.start()
        for driver, worker in zip(self._drivers, self._workers, strict=True):
            worker.submit(functools.partial(driver.run, step, batches))
            self.running += len(driver.machines)

    def _hear(self, timeout: float | None) -> Finished | None:
        """Wait for the next report; None is a signal. Raises Empty after the timeout."""
        report = self._reports.get(timeout=timeout)
        if report is not None and report.device is not None:
            self.running -= 1
        return report

    def _wait(
        self,
        signals: HeldSignals,
        done: Callable[[], bool],
        unheard: Callable[[Finished], ExecutionError] | None = None,
    ) -> None:
        """Handle reports until ``done``. Raises the first failure, or a signal's exception.

        With ``unheard``, which makes the error, a failure stays reported until the next wait.
        """
        interrupt: BaseException | None = None
        try:
            while not done():
                try:
                    report = self._hear(POLL)
                except Empty:
                    self.check()
                    continue
                if report is None:
                    if signals.held is None or not self._interruptible():
                        continue  # the exception stays held
                    interrupt = signals.take()
                    assert interrupt is not None
                    if unheard is None:
                        interrupt.add_note(f"interrupted: {self._interrupted(interrupt)}")
                    raise interrupt
                elif report.error is None or isinstance(report.error, Stopped):
                    self._note(report)
                elif unheard is not None:
                    self._reports.put(report)
                    self.running += report.device is not None
                    raise unheard(report) from report.error
                elif report.device is None:
                    report.error.add_note(self._give_up())
                    raise report.error
                else:
                    raise self._failure(report) from report.error
        finally:
            interrupt = None  # else the exception and this frame would refer to each other

    def _failure(self, report: Finished) -> ExecutionError:
        """Stop the run and make the error for what an instruction raised."""
        cause, device = report.error, report.device
        assert cause is not None and device is not None
        machine = next(machine for machine in self.machines if machine.device == device)
        position, step = machine.position, machine.step
        self._group.announce(explained_failure(machine, cause, ""))
        late = self._lost(cause, f"device {device} was given {running(machine)}")
        if late is not None:
            return late
        consequence = self._give_up()
        machine.position, machine.step = position, step
        return explained_failure(machine, cause, consequence)

    def _lost(self, cause: BaseException, when: str) -> DeviceError | None:
        """Give up if a device reports a failure late, and return the error, else None. Rolling back
        may fail, too, then."""
        late = self._backend.late(cause, when)
        if late is not None:
            with suppress(Exception):
                self._give_up()
        return late

    def _interruptible(self) -> bool:
        """Whether a signal may interrupt the run now."""
        return True

    def _interrupted(self, error: BaseException) -> str:
        """End the run because of a signal. Returns where the devices were, and what became of the
        weights, in words."""
        self._group.announce(error)
        places = "; ".join(map(whereabouts, self.machines))
        return f"{places}; {self._give_up()}"

    def _give_up(self) -> str:
        """Stop all devices. Returns what became of the weights, in words."""
        raise NotImplementedError

    def _end(self, why: str) -> str:
        """End the pipe, as the stages are at different updates. Returns this, in words."""
        self._ended(why)
        return f"{why}, so the pipe has ended; {RESTORE}"

    def _note(self, report: Finished) -> None:
        """Take note of a report that is not of a failure."""


class FlushedRun(BatchRun[LiveWeights]):
    """A run of one batch, which is finished before the next one begins.

    ``advance`` runs it to its end or its next pause and commits the results to the model. Before
    the first update nothing outside of this object changes; a failure after it ends the pipe.

    Attributes:
        committed: whether the last ``advance`` committed its results.
    """

    committed = False

    def feed(self, job: Job) -> None:
        """Set the batch that ``advance`` runs."""
        self._jobs[0] = job
        self._channels.fed(0)

    def advance(self, result: Callable[[], R]) -> R:
        """Run every device to the end of its list or its next pause, and commit.

        Args:
            result: computes the value to return; called before ``.grad`` changes.

        Raises:
            ExecutionError: an instruction raised; all devices have been stopped. The weights are as
                before, or, if an update had begun, the pipe has ended.
            KeyboardInterrupt: or another exception of a signal handler; its note says where the
                devices were, and whether the weights are as before or as after.
        """
        self.committed = False
        with self._held() as signals:
            try:
                self._backend.begin(self._jobs[0].host)
                self._start(0)
                self._wait(signals, lambda: self.running == 0)
                self._backend.end()
                self._settle()
                if self.weights.begun:  # all stages have updated: the step counts, come what may
                    self._commit()
                returned = result()
                if not self.committed:
                    self._commit()
            except BaseException as error:
                if self.committed:
                    error.add_note("all stages have updated, and the step counts")
                    raise
                late = self._backend.late(error, "a step began or ended")
                self._leave(late or error)
                if late is not None:
                    raise late from error
                raise
            self._channels.pause()
            if signals.held is not None:
                signals.held.add_note("interrupted after the step, whose results are kept")
            self._clear()
        return returned

    def _commit(self) -> None:
        written = {n: value for m in self.machines for n, value in m.store.state.items()}
        self.weights.commit(written, self.gradients())
        self.committed = True
        self._group.kept += 1

    def _interruptible(self) -> bool:
        """See BatchRun; once an update may have begun, all are let finish."""
        return self.weights.stop_before_updates(self._group.size > 1)

    def _give_up(self) -> str:
        if self.stop():
            for machine in self.machines:
                machine.store.clear()
        # before the barrier, no update of this replica has begun
        begun = self.weights.arrived or self._group.replicas > 1
        ranks = self._group.outcomes(self.weights.outcome()) if begun else []
        whole, in_part = (
            sorted({stage for outcome in ranks for stage in outcome if outcome[stage] is ended})
            for ended in (True, False)
        )
        updated = [
            f"{stages_text(stages)} {what}"
            for stages, what in ((whole, "updated with this batch"), (in_part, "only in part"))
            if stages
        ]
        if not updated:
            return "the weights are as before the step"
        return self._end(" and ".join(updated))

    def _leave(self, error: BaseException) -> None:
        """Stop after a failure, if that is not done yet, and say what became of the weights."""
        if not self.failed:
            error.add_note(self._give_up())
        try:
            self._backend.end()  # what was launched may still run
        except RuntimeError as after:  # a device that has failed says so at every call
            if not isinstance(error, DeviceError):
                error.add_note(f"since then a device reports {told(after)}")
        except Exception:
            if not isinstance(error, DeviceError):
                raise

    def _clear(self) -> None:
        """Drop the values; at a pause, keep those that the rest of the list reads."""
        for machine in self.machines:
            if machine.at_end:
                machine.store.clear()
            machine.store.state.clear()
            machine.store.gradients.clear()

    def gradients(self) -> dict[int, list[Tensor | None]]:
        """Stage → the sums of its parameters' gradients."""
        return {s: g for m in self.machines for (s, _), g in m.store.gradients.items()}
