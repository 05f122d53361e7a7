"""Steps that overlap: batches in flight, and what happens to them when something fails.

A step hands its window to the workers and waits for the outputs of the batch before alone: the
first device needs the next batch before the last one is through the forwards of this one, and would
otherwise be idle. ``drain`` runs all that is left to its end.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from torch import Tensor

from fxpipe.edge import HOST
from fxpipe.errors import DeviceError, ExecutionError, InputError
from fxpipe.kernels.kernel import Kernel
from fxpipe.plan import Plan
from fxpipe.program import Buffer, Program
from fxpipe.runtime.backend import Backend, Common
from fxpipe.runtime.clipping import Clipping
from fxpipe.runtime.clock import Clock
from fxpipe.runtime.cpu import Worker
from fxpipe.runtime.driver import Driver
from fxpipe.runtime.execution import GRACE, POLL
from fxpipe.runtime.failure import Expected, explained, explained_late, whereabouts
from fxpipe.runtime.host import BatchHost
from fxpipe.runtime.interpreter import Job, Stopped
from fxpipe.runtime.versions import VersionedWeights
from fxpipe.signals import HeldSignals


class Left(NamedTuple):
    """A device has left a step's list, at its end or because of an error."""

    device: int
    step: int
    error: BaseException | None = None


class Landed(NamedTuple):
    """A batch's outputs are all with the caller."""

    batch: int


class Flight:
    """A program of overlapping batches on its way through the workers.

    Attributes:
        program: the program.
        count: the number of the next batch, from the first that the pipe has trained on.
        failed: whether it is over: what was in flight is dropped.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        weights: VersionedWeights,
        workers: Sequence[Worker],
        *,
        clock: Clock | None = None,
        backend: Backend,
        expected: Expected | None = None,
    ) -> None:
        """Nothing is in flight yet.

        Args:
            program: a verified program.
            plan: the plan that it was lowered from.
            weights: the versions, bound to the plan.
            workers: one for each thread of the backend.
            clock: takes the time of every instruction, if given.
            backend: what runs the devices' lists.
            expected: what the devices are predicted to hold, for messages.
        """
        self._backend = backend
        self._expected = expected
        self.program = program
        self.count = weights.slowest
        self.failed = False
        self._first = self.count
        self._weights = weights
        self._workers = workers
        self._wires = backend.wires(program)
        self._jobs: dict[int, Job] = {}
        common = Common(program, plan.stages, self._jobs, weights)
        self._machines = [
            backend.machine(self._wires, device, common, self.count)
            for device in range(program.devices)
        ]
        for machine in self._machines:
            machine.step = self.count
        self._drivers = backend.drivers(self._machines)
        if clock is not None:
            clock.watch(self._machines)
        # None wakes the caller
        self._reports: SimpleQueue[Left | Landed | None] = SimpleQueue()
        self._running = 0
        self._left = [self.count - 1] * program.devices
        # batch → what is called when its outputs are there
        self._pending: dict[int, Callable[[], None]] = {}
        self._states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self._machines]

    @property
    def peak_kept(self) -> Counter[int]:
        """Stage → the most micro-batches whose saved values were alive at once."""
        return sum((machine.store.peak for machine in self._machines), Counter())

    def step(
        self,
        kernels: Sequence[Sequence[Kernel]],
        host: BatchHost,
        clipping: Clipping | None = None,
        landed: Callable[[], None] = lambda: None,
    ) -> int:
        """Start the next batch's step, and wait until the outputs of the one before are there.

        Args:
            kernels: micro-batch → stage → what runs it.
            host: the caller's side.
            clipping: how gradients are clipped, if the program clips.
            landed: called when the caller waits and the batch's outputs are there.

        Returns:
            The batch's number, for ``wait_for``.

        Raises:
            ExecutionError: an instruction raised, of this batch or of one before; it says which
                batches count. The flight is over.
            KeyboardInterrupt: or what else a signal's handler raises, likewise.
        """
        batch = self.count
        with HeldSignals(wake=lambda: self._reports.put(None)) as signals:
            self._weights.expect(batch)
            host_ = _Watched(host, len(kernels), lambda: self._reports.put(Landed(batch)))
            self._pending[batch] = landed
            self._jobs[batch] = Job(kernels, host_, clipping)
            self.count += 1
            with self._telling_late():
                self._backend.begin()
            self._submit(batch)
            self._wait(signals, lambda: all(each >= batch for each in self._pending))
            with self._telling_late():
                self._backend.end()
            if signals.held is not None:
                signals.held.add_note("interrupted after the step, whose batch counts")
        return batch

    def wait_for(self, batch: int) -> None:
        """Wait until the outputs of a batch are there. Raises as ``step`` does."""
        if batch not in self._pending:
            return
        if self.failed:
            raise InputError(
                f"the loss of batch {batch} never came: a failure or an interrupt has dropped that "
                "batch; train on it again"
            )
        with HeldSignals(wake=lambda: self._reports.put(None)) as signals:
            self._wait(signals, lambda: batch not in self._pending)

    def drain(self) -> None:
        """Run all batches in flight to their end. Raises as ``step`` does."""
        with HeldSignals(wake=lambda: self._reports.put(None)) as signals:
            for step in range(self.count, self.count + self.program.depth):
                self._submit(step)
            self._wait(signals, lambda: self._running == 0)
            with self._telling_late():
                self._backend.end()
            self._commit(self.count - 1)
            self._weights.trim()
            for machine in self._machines:
                machine.store.state.clear()
            self._jobs.clear()

    def abandon(self) -> None:
        """Drop what is in flight; the weights are then those of the last batch that was done."""
        if not self.failed:
            self._stop()

    def _submit(self, step: int) -> None:
        batches = range(self._first, self.count)
        for driver, worker in zip(self._drivers, self._workers, strict=True):
            worker.submit(functools.partial(self._drive, driver, step, batches))
            self._running += len(driver.machines)

    def _drive(self, driver: Driver, step: int, batches: range) -> None:
        """A worker's job: run its devices' lists of a step and report."""
        try:
            if self._wires.stopping:
                raise Stopped
            for machine in driver.machines:
                machine.begin(step, batches)
            driver.run()
            for machine in driver.machines:
                # all forwards of the step's own batch are done
                machine.store.state = self._weights.gathered(machine.store.state)
                self._states[machine.device][step] = dict(machine.store.state)
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

    def _wait(self, signals: HeldSignals, done: Callable[[], bool]) -> None:
        """Take reports until something is so, or something has failed."""
        while not done():
            try:
                report = self._reports.get(timeout=POLL)
            except Empty:
                continue
            if report is None:
                interrupt = signals.take()
                if interrupt is not None:
                    places = "; ".join(map(whereabouts, self._machines))
                    interrupt.add_note(f"interrupted: {places}; {self._stop()}")
                    raise interrupt
            elif isinstance(report, Landed):
                self._pending.pop(report.batch)()
            else:
                self._note(report)
                if report.error is not None and not isinstance(report.error, Stopped):
                    raise self._failure(report.device, report.error) from report.error

    def _note(self, report: Left) -> None:
        self._running -= 1
        if report.error is None:
            self._left[report.device] = report.step
            over = min(self._left) - self.program.depth
            for batch in [batch for batch in self._jobs if batch <= over]:
                del self._jobs[batch]
            for states in self._states:
                for step in [step for step in states if step < over - 1]:
                    del states[step]

    def _failure(self, device: int, cause: BaseException) -> ExecutionError:
        machine = self._machines[device]
        position, step = machine.position, machine.step
        if late := self._lost(cause, f"device {device} was at batch {step}", device):
            return late
        consequence = self._stop()
        machine.position, machine.step = position, step
        return explained(machine, cause, consequence, self._backend, self._expected)

    def _lost(
        self, cause: BaseException, when: str, noticed: int | None = None
    ) -> DeviceError | None:
        """What a device reports late: then it need not let anything be put back."""
        late = explained_late(cause, when, self._backend, noticed)
        if late is not None:
            with suppress(Exception):
                self._stop()
        return late

    @contextmanager
    def _telling_late(self) -> Iterator[None]:
        """Inside the caller's thread uses the devices."""
        try:
            yield
        except Exception as error:
            if late := self._lost(error, "a batch began or ended"):
                raise late from error
            raise

    def _stop(self) -> str:
        """Stop all devices and put the weights back. Returns what that means, in words."""
        self.failed = True
        updating = self._weights.stop()
        self._wires.stop()
        deadline = time.monotonic() + GRACE
        while self._running:
            try:
                timeout = None if updating else max(deadline - time.monotonic(), 0)
                report = self._reports.get(timeout=timeout)
            except Empty:
                break  # it drops its values when its thread comes to it
            if isinstance(report, Left):
                self._note(report)
            elif isinstance(report, Landed):
                self._pending.pop(report.batch)()
        for job in self._jobs.values():
            if job.clipping is not None:
                job.clipping.forget()
        done = self._weights.recover()
        self._commit(done - 1)
        for machine in self._machines:
            machine.store.clear()
        self._jobs.clear()
        dropped = self.count - done
        self.count = done
        return (
            f"the weights are those after {done} batches, and the {dropped} that came later are "
            "dropped"
        )

    def _commit(self, batch: int) -> None:
        """Make the buffers the model's as they were after a batch."""
        for states in self._states:
            if batch in states:
                self._weights.commit(states[batch])


class _Watched:
    """A batch's host, which tells when the caller has all that it wants."""

    def __init__(self, host: BatchHost, microbatches: int, landed: Callable[[], None]) -> None:
        self._host = host
        self._missing = microbatches * len(host.keep)
        self._landed = landed
        self._lock = threading.Lock()

    def give(self, buffer: Buffer) -> Any:
        """See Host.give."""
        return self._host.give(buffer)

    def take(self, buffer: Buffer, value: Any) -> None:
        """See Host.take."""
        self._host.take(buffer, value)
        if buffer.target == HOST and buffer.kind == "out" and buffer.value in self._host.keep:
            with self._lock:
                self._missing -= 1
                landed = self._missing == 0
            if landed:
                self._landed()
