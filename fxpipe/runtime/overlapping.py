"""Steps that overlap: batches in flight, and what happens to them when something fails.

A step submits its window to the workers and waits only for the outputs of the batch before: the
first device would be idle if it got the next batch only after the last device has finished this
batch's forwards. ``drain`` finishes all batches in flight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fxpipe.errors import InputError, RankError
from fxpipe.runtime.devices.backend import Driver
from fxpipe.runtime.host import Job
from fxpipe.runtime.interpreter import Machine
from fxpipe.runtime.run import Finished, Run
from fxpipe.runtime.weights.versions import VersionedWeights
from fxpipe.signals import HeldSignals


class OverlappingRun(Run[VersionedWeights]):
    """A run of batches without a flush between them.

    Attributes:
        count: the number of the next batch, from the first that the pipe has trained on.
    """

    def __init__(self, *where: Any, first: int, **how: Any) -> None:
        """No batch is in flight yet. See Run; the weights must be bound to the plan."""
        super().__init__(*where, first=first, **how)
        self.count = self._first = first
        # device → the last step whose list it has left; of each that this process runs
        self._left = dict.fromkeys((m.device for m in self.machines), self.count - 1)
        # batch → the function to call when its outputs are there
        self._pending: dict[int, Callable[[], None]] = {}
        # device → step → the buffers that it has written up to that step's forwards
        self._states: dict[int, dict[int, dict[str, Tensor]]] = {d: {} for d in self._left}
        self.weights.when_updated(self._channels.updated)
        self._channels.when_updated(self.weights.note)

    @property
    def busy_step(self) -> float | None:
        """Processor seconds of the workers in the last full step; None before there was one."""
        whole = min(self._left.values()) - self._first >= self.program.depth
        return self.busy if whole else None

    def step(self, job: Job, arrived: Callable[[], None], *, whole: bool) -> None:
        """Start the step of batch ``count``, and wait until the outputs of the one before are
        there.

        Args:
            job: the batch.
            arrived: called when the caller waits and the batch's outputs are there.
            whole: whether to wait for the outputs of this batch, too.

        Raises:
            ExecutionError: an instruction of this batch or of an earlier one raised; the message
                says which batches count. The run is over.
            KeyboardInterrupt: or another exception of a signal handler, likewise.
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
            self._ask(self._backend.begin)
            self._submit(batch)
            self._wait(
                signals,
                lambda: (
                    self._reports.empty() and all(each >= batch + whole for each in self._pending)
                ),
            )
            self._ask(self._backend.end)
            self._together(signals, lambda: self._group.settle(None))
            if signals.held is not None:
                signals.held.add_note("interrupted after the step, whose batch counts")

    def wait_for(self, batch: int) -> None:
        """Wait until the outputs of a batch are there. Raises like ``step``."""
        if batch not in self._pending:
            return
        if self.failed:
            raise InputError(
                f"the loss of batch {batch} never came: a failure or an interrupt has dropped that "
                "batch; train on it again"
            )
        self.check()
        with self._held() as signals:
            rolls_back = self._group.called
            self._wait(signals, lambda: batch not in self._pending, rolls_back=rolls_back)

    def drain(self) -> None:
        """Finish all batches in flight. Raises like ``step``."""
        self.check()
        with self._held() as signals:
            for step in range(self.count, self.count + self.program.depth):
                self._submit(step)
            self._wait(signals, lambda: self.running == 0)
            self._ask(self._backend.end)
            self._together(signals, self._settle)
            self._commit(self.count - 1)
            self._group.kept += 1
            self.weights.trim()
            for machine in self.machines:
                machine.store.state.clear()
            self._jobs.clear()

    def check(self) -> None:
        """Check that the workers can run.

        Raises:
            InputError: they cannot. The run is over, unless this is a forked process.
        """
        try:
            super().check()
        except InputError as error:
            if not self.forked:
                error.add_note(self._give_up())
            raise

    def abandon(self) -> str:
        """Drop the batches in flight; the weights are then those after the last finished batch.
        Returns which batches count, in words; nothing where they were dropped before."""
        return "" if self.failed or self.forked else self._give_up()

    def _submit(self, step: int) -> None:
        batches = range(self._first, self.count)
        self._start(step, functools.partial(self._run_lists, step, batches))

    def _run_lists(self, step: int, batches: range, driver: Driver) -> None:
        """A worker's job: run its devices' lists of a step."""
        for machine in driver.machines:
            machine.begin(step, batches)
        driver.run()
        self._channels.flush()
        for machine in driver.machines:
            self._pool(machine, step)
            self._keep_state(machine)

    def _keep_state(self, machine: Machine) -> None:
        """Keep the buffers of a device, where all forwards of the step's own batch are done."""
        if self.weights.defers:
            with self._backend.computing(machine.device):
                machine.store.state = self.weights.gathered(machine.store.state)
        self._states[machine.device][machine.step] = dict(machine.store.state)

    def _note(self, report: Finished) -> None:
        if report.device is None:
            self._ask(self._backend.end)  # the outputs are launched, and maybe not computed yet
            self._pending.pop(report.step)()
        elif report.error is None:
            self._left[report.device] = report.step
            over = min(self._left.values()) - self.program.depth
            for batch in [batch for batch in self._jobs if batch <= over]:
                if batch not in self._pending:  # outputs of other processes may come later
                    del self._jobs[batch]
            kept = min(over, self.weights.slowest) - 1  # a stage of another process may be slower
            for states in self._states.values():
                for step in list(states):  # a copy: the device's thread may add another meanwhile
                    if step < kept:
                        del states[step]

    def _ask(self, devices: Callable[[], None]) -> None:
        """Call the backend's ``begin`` or ``end``; a late error of a device ends the run."""
        try:
            devices()
        except Exception as error:
            if self.failed:
                return
            if late := self._lost(error, "a batch began or ended"):
                raise late from error
            raise

    def _together(self, signals: HeldSignals, settle: Callable[[], object]) -> None:
        """Wait for the other processes at the end of a call; where one has failed, roll back."""
        try:
            settle()
        except RankError as error:
            # raises what a device here has reported, or is about to report
            self._wait(
                signals,
                lambda: self._reports.empty() and not (self._channels.stopping and self.running),
            )
            self._group.announce(error)
            error.add_note(self._give_up())
            raise

    def _give_up(self) -> str:
        """Stop all devices and roll the weights back. Returns which batches count, in words."""
        self.stop()
        for job in self._jobs.values():
            if job.clipping is not None:
                job.clipping.forget()
        self._ask(self._backend.end)  # updates that were launched may still run
        written = [(self._states[m.device], m.store.state) for m in self.machines]
        alone = self._group.replicas == 1
        own = None if alone else written[0]
        done, twins = self._group.recovered(self.weights.own_slowest, own)
        self.weights.recover(done)
        for machine in self.machines:
            states = self._states[machine.device]
            if machine.step != done - 1 or machine.step in states:
                continue
            # it has not come to its list's end after its update
            kept = [] if alone else [own[machine.step] for own, _ in twins if machine.step in own]
            if kept:
                states[machine.step] = kept[0]
                continue
            if not alone:
                machine.store.state = self.weights.pooled([own for _, own in twins])
            self._keep_state(machine)
        self._commit(done - 1)
        for machine in self.machines:
            machine.store.clear()
        self._jobs.clear()
        dropped = self.count - done
        self.count = done
        return (
            f"the weights are those after {done} batches, and the {dropped} that came later are "
            "dropped"
        )

    def _commit(self, batch: int) -> None:
        """Write the model's buffers as they were after a batch."""
        for states in self._states.values():
            if batch in states:
                self.weights.commit(states[batch])
