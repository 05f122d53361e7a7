"""Steps that overlap: batches in flight, and what happens to them when something fails.

A step hands its window to the workers and waits for the outputs of the batch before alone: the
first device needs the next batch before the last one is through the forwards of this one, and would
otherwise be idle. ``drain`` runs all that is left to its end.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty
from typing import Any

from torch import Tensor

from fxpipe.errors import DeviceError, ExecutionError, InputError
from fxpipe.ir.program import Buffer
from fxpipe.ir.value import HOST
from fxpipe.kernels.kernel import Kernel
from fxpipe.runtime.failure import explained_late
from fxpipe.runtime.host import BatchHost
from fxpipe.runtime.interpreter import Job
from fxpipe.runtime.run import Crew, Driver, Landed, Left, Setting
from fxpipe.runtime.weights.clipping import Clipping
from fxpipe.runtime.weights.versions import VersionedWeights
from fxpipe.signals import HeldSignals


class Flight:
    """A program of overlapping batches on its way through the workers.

    Attributes:
        program: the program.
        threads: how many drive the devices.
        count: the number of the next batch, from the first that the pipe has trained on.
        failed: whether it is over: what was in flight is dropped.
    """

    def __init__(self, setting: Setting, weights: VersionedWeights) -> None:
        """Nothing is in flight yet.

        Args:
            setting: the program, and what runs it.
            weights: the versions, bound to the plan.
        """
        self.program = setting.program
        self.threads = len(setting.workers)
        self.count = weights.slowest
        self.failed = False
        self._backend = setting.backend
        self._first = self.count
        self._weights = weights
        self._jobs: dict[int, Job] = {}
        self._crew = Crew(setting, self._jobs, weights, self.count)
        for machine in self._crew.machines:
            machine.step = self.count
        self._left = [self.count - 1] * self.program.devices
        # batch → what is called when its outputs are there
        self._pending: dict[int, Callable[[], None]] = {}
        self._states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self._crew.machines]

    @property
    def peak_kept(self) -> Counter[int]:
        """Stage → the most micro-batches whose saved values were alive at once."""
        return self._crew.peak_kept

    @property
    def busy(self) -> float | None:
        """Processor seconds of the workers in the last step, once there was a whole one."""
        whole = min(self._left) - self._first >= self.program.depth
        return self._crew.busy if whole else None

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
        self.check()
        batch = self.count
        with HeldSignals(wake=lambda: self._crew.tell(None)) as signals:
            self._weights.expect(batch)
            host_ = _Watched(host, len(kernels), lambda: self._crew.tell(Landed(batch)))
            self._pending[batch] = landed
            self._jobs[batch] = Job(kernels, host_, clipping)
            self.count += 1
            self._ask(self._backend.begin)
            self._submit(batch)
            self._wait(signals, lambda: all(each >= batch for each in self._pending))
            self._ask(self._backend.end)
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
        self.check()
        with HeldSignals(wake=lambda: self._crew.tell(None)) as signals:
            self._wait(signals, lambda: batch not in self._pending)

    def drain(self) -> None:
        """Run all batches in flight to their end. Raises as ``step`` does."""
        self.check()
        with HeldSignals(wake=lambda: self._crew.tell(None)) as signals:
            for step in range(self.count, self.count + self.program.depth):
                self._submit(step)
            self._wait(signals, lambda: self._crew.running == 0)
            self._ask(self._backend.end)
            self._commit(self.count - 1)
            self._weights.trim()
            for machine in self._crew.machines:
                machine.store.state.clear()
            self._jobs.clear()

    @property
    def forked(self) -> bool:
        """Whether this is asked in another process, where nothing is in flight."""
        return self._crew.forked

    def check(self) -> None:
        """See that the workers are there.

        Raises:
            InputError: they are not. The flight is over, in the process in which it was.
        """
        try:
            self._crew.check()
        except InputError as error:
            if not self.forked:
                error.add_note(self._stop())
            raise

    def abandon(self) -> None:
        """Drop what is in flight; the weights are then those of the last batch that was done."""
        if not self.failed and not self.forked:
            self._stop()

    def _submit(self, step: int) -> None:
        batches = range(self._first, self.count)
        self._crew.start(step, functools.partial(self._drive, step, batches))

    def _drive(self, step: int, batches: range, driver: Driver) -> None:
        """A worker's job: run its devices' lists of a step."""
        for machine in driver.machines:
            machine.begin(step, batches)
        driver.run()
        for machine in driver.machines:
            # all forwards of the step's own batch are done
            if self._weights.defers:
                with self._backend.computing(machine.device):
                    machine.store.state = self._weights.gathered(machine.store.state)
            self._states[machine.device][step] = dict(machine.store.state)

    def _wait(self, signals: HeldSignals, done: Callable[[], bool]) -> None:
        """Take reports until something is so, or something has failed."""
        while not done():
            try:
                report = self._crew.hear()
            except Empty:
                self.check()
                continue
            if report is None:
                interrupt = signals.take()
                if interrupt is not None:
                    places = self._crew.whereabouts
                    interrupt.add_note(f"interrupted: {places}; {self._stop()}")
                    raise interrupt
                continue
            self._note(report)
            if isinstance(report, Left) and report.error is not None and report.failed:
                raise self._failure(report.device, report.error) from report.error

    def _note(self, report: Left | Landed) -> None:
        if isinstance(report, Landed):
            self._ask(self._backend.end)  # the outputs are launched, and maybe not made yet
            self._pending.pop(report.batch)()
        elif report.error is None:
            self._left[report.device] = report.step
            over = min(self._left) - self.program.depth
            for batch in [batch for batch in self._jobs if batch <= over]:
                del self._jobs[batch]
            for states in self._states:
                for step in list(states):  # a copy: the device may add its next at any time
                    if step < over - 1:
                        del states[step]

    def _failure(self, device: int, cause: BaseException) -> ExecutionError:
        machine = self._crew.machines[device]
        position, step = machine.position, machine.step
        if late := self._lost(cause, f"device {device} was at batch {step}", device):
            return late
        consequence = self._stop()
        machine.position, machine.step = position, step
        return self._crew.explained(device, cause, consequence)

    def _lost(
        self, cause: BaseException, when: str, noticed: int | None = None
    ) -> DeviceError | None:
        """What a device reports late: then it need not let anything be put back."""
        late = explained_late(cause, when, self._backend, noticed)
        if late is not None:
            with suppress(Exception):
                self._stop()
        return late

    def _ask(self, devices: Callable[[], None]) -> None:
        """Begin or end a run on the devices; while all is stopped, what fails is told anyway."""
        try:
            devices()
        except Exception as error:
            if self.failed:
                return
            if late := self._lost(error, "a batch began or ended"):
                raise late from error
            raise

    def _stop(self) -> str:
        """Stop all devices and put the weights back. Returns what that means, in words."""
        self.failed = True
        self._crew.stop(self._note)
        for job in self._jobs.values():
            if job.clipping is not None:
                job.clipping.forget()
        self._ask(self._backend.end)  # updates may be on their way still
        done = self._weights.recover()
        self._commit(done - 1)
        for machine in self._crew.machines:
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
