"""Steps that overlap: batches in flight, and what happens to them after a failure.

A step submits its window to the workers and waits only for the outputs of the batch before. If it
waited for its own batch, the first device would be idle until the last one has finished the
forwards. ``drain`` finishes all batches in flight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from fxpipe.errors import RESTORE, EndedError, ExecutionError, InputError, RankError
from fxpipe.extensions.overlapping.versions import VersionedWeights
from fxpipe.formatting import stages_text
from fxpipe.runtime.driver import Finished
from fxpipe.runtime.failure import explained_failure
from fxpipe.runtime.host import Job
from fxpipe.runtime.run import BatchRun
from fxpipe.signals import HeldSignals


class OverlappingRun(BatchRun[VersionedWeights]):
    """A run of batches without a flush between them.

    Attributes:
        count: the number of the next batch, counted from the first that the pipe trained on.
    """

    def __init__(self, *where: Any, first: int, **how: Any) -> None:
        """See BatchRun; no batch is in flight yet. The weights must be bound to the plan."""
        super().__init__(*where, first=first, **how)
        self.count = self._first = first
        # device of this process → the last step whose list it has left
        self._left = dict.fromkeys((m.device for m in self.machines), self.count - 1)
        # batch → the function to call when its outputs have come
        self._pending: dict[int, Callable[[], None]] = {}
        # outputs that the caller has read: devices use their memory again once they follow that
        self._read: list[Any] = []
        self._draining = False

    def step(self, job: Job, arrived: Callable[[], None], *, whole: bool) -> None:
        """Start the step of batch ``count``, and wait for the outputs of the batch before.

        Args:
            job: the batch.
            arrived: called in a wait of the caller, once the batch's outputs have come.
            whole: whether to wait for the outputs of this batch, too.

        Raises:
            ExecutionError: an instruction of this batch or of an earlier one raised. The pipe has
                ended; the message says with how many batches each stage has updated.
            KeyboardInterrupt: or another exception of a signal handler. In one process the batch
                stays in flight; over ranks the pipe has ended.
        """
        self.check()
        batch = self.count
        with self._held() as signals:
            self.weights.expect(batch)
            job.host.when_complete(lambda: self._reports.put(Finished(batch)))
            self._pending[batch] = arrived
            self._jobs[batch] = job
            self._channels.fed(batch)
            self.count += 1
            self._ask(functools.partial(self._backend.begin, job.host))
            self._read.clear()
            self._submit(batch)
            self._wait(
                signals,
                lambda: (
                    self._reports.empty() and all(later >= batch + whole for later in self._pending)
                ),
            )
            self._ask(self._backend.end)
            self._together(signals, lambda: self._group.settle(None))
            if signals.held is not None:
                signals.held.add_note("interrupted after the step, whose batch counts")

    def wait_for(self, batch: int) -> None:
        """Wait for the outputs of a batch. Raises like ``step``; and EndedError if an earlier
        failure has ended the run, or RankError if that was the loss of a rank."""
        if batch not in self._pending:
            return
        if self.failed:
            self._group.check()
            raise EndedError(
                f"the loss of batch {batch} never came: a failure or an interrupt has dropped that "
                f"batch and ended the pipe; {RESTORE}"
            )
        self.check()
        with self._held() as signals:
            unheard = None if self._group.called else self._unheard
            self._wait(signals, lambda: batch not in self._pending, unheard)

    def _unheard(self, report: Finished) -> ExecutionError:
        """The error for a failure that the other ranks have not heard of, while the run goes on."""
        means = "the loss cannot come, and the next call of the pipe raises this on every rank"
        if isinstance(report.error, RankError):
            return RankError(f"{report.error}; {means}", rank=report.error.rank)
        machine = next(machine for machine in self.machines if machine.device == report.device)
        return explained_failure(machine, cast(BaseException, report.error), means)

    def drain(self) -> None:
        """Finish all batches in flight. Raises like ``step``."""
        self.check()
        self._draining = True
        with self._held() as signals:
            for step in range(self.count, self.count + self.program.depth):
                self._submit(step)
            self._wait(signals, lambda: self.running == 0)
            self._ask(self._backend.end)
            self._together(signals, self._settle)
            for machine in self.machines:
                self.weights.commit(machine.store.state)
                machine.store.state.clear()
            self._group.kept += 1
            self.weights.finished(self.count)
            self._jobs.clear()
            self._read.clear()

    def check(self) -> None:
        """Check that the workers can run. Raises InputError if they cannot; the run is over
        then."""
        try:
            super().check()
        except InputError as error:
            error.add_note(self._give_up())
            raise

    def abandon(self) -> str:
        """Drop the batches in flight, which ends the pipe. Returns with how many batches each stage
        has updated, in words; empty if they were dropped before."""
        return "" if self.failed else self._give_up()

    def _submit(self, step: int) -> None:
        self._start(step, range(self._first, self.count))

    def _note(self, report: Finished) -> None:
        if report.device is None:
            self._ask(self._backend.end)  # the outputs may be launched but not computed yet
            self._pending.pop(report.step)()
            self._read.append(self._jobs[report.step].host.outputs)
        elif report.error is None:
            self._left[report.device] = report.step
            over = min(self._left.values()) - self.program.depth
            for batch in [batch for batch in self._jobs if batch <= over]:
                if batch not in self._pending:  # outputs from other processes may come later
                    del self._jobs[batch]

    def _ask(self, devices: Callable[[], None]) -> None:
        """Call the backend's ``begin`` or ``end``; a failure that it reports ends the run."""
        try:
            devices()
        except Exception as error:
            if self.failed:
                return
            if late := self._lost(error, "a batch began or ended"):
                raise late from error
            raise

    def _together(self, signals: HeldSignals, settle: Callable[[], object]) -> None:
        """Wait for the other processes at the end of a call; if one has failed, end the run."""
        try:
            settle()
        except RankError as error:
            # raises an error that a device here has reported, or is about to report
            self._wait(
                signals,
                lambda: self._reports.empty() and not (self._channels.stopping and self.running),
            )
            self._group.announce(error)
            error.add_note(self._give_up())
            raise

    def _interruptible(self) -> bool:
        return not self._draining

    def _interrupted(self, error: BaseException) -> str:
        if self._group.size > 1:  # the other ranks would wait
            return super()._interrupted(error)
        return f"batch {self.count - 1} is in flight, and counts; the pipe can go on"

    def _give_up(self) -> str:
        """Stop all devices, which ends the pipe. Returns with how many batches each stage has
        updated, in words."""
        self.stop()
        for job in self._jobs.values():
            if job.clipping is not None:
                job.clipping.forget()
        self._ask(self._backend.end)  # updates that were launched may still run
        for machine in self.machines:
            machine.store.clear()
        self._jobs.clear()
        self._read.clear()
        reached = self.weights.outcome()
        updated = [
            f"{stages_text([s for s in reached if reached[s] == count])} with {count}"
            for count in sorted({*reached.values()})
        ]
        return self._end(
            f"of {self.count} begun batches, the stages have updated with: {', '.join(updated)}"
        )
