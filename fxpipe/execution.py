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

from fxpipe import source
from fxpipe.cpu import CpuWires, Worker
from fxpipe.errors import ExecutionError
from fxpipe.interpreter import Host, Machine, Stopped
from fxpipe.kernel import Kernel
from fxpipe.plan import Plan
from fxpipe.program import Instruction, Load, Pop, Program, Receive
from fxpipe.signals import HeldSignals
from fxpipe.text.instruction import print_instruction
from fxpipe.weights import LiveWeights

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
    ) -> None:
        """Prepare a run.

        Args:
            program: a verified program.
            plan: the plan that it was lowered from.
            kernels: micro-batch → stage → what runs it.
            host: the caller's side.
            weights: parameters, buffers and optimizers.
            workers: device → its worker.
        """
        self.committed = False
        self._workers = workers
        self._weights = weights
        self._wires = CpuWires(program.devices)
        self._machines = [
            Machine(program, device, plan.stages, kernels, host, self._wires, weights)
            for device in range(program.devices)
        ]
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
                self._run(signals)
                made = result()
                self._weights.commit(self._written(), self._gradients())
            except BaseException:
                self._weights.roll_back()
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
                for machine, worker in zip(self._machines, self._workers, strict=True):
                    worker.submit(functools.partial(self._drive, machine))
                    waiting += 1
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
                places = "; ".join(map(self._at, range(len(self._machines))))
                interrupt.add_note(f"interrupted a step, the weights are as before it: {places}")
                raise interrupt
            if failure is not None:
                raise self._explained(failure) from failure.error
        except BaseException:
            self._stop(waiting)
            raise
        finally:
            interrupt = None  # or the exception and this frame would hold each other

    def _drive(self, machine: Machine) -> None:
        """A worker's job: run one device and report."""
        try:
            machine.run()
            self._reports.put(Report(machine.device))
        except BaseException as error:
            if not isinstance(error, Stopped):
                self._weights.stop()
                self._wires.stop()
            self._reports.put(Report(machine.device, error))

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
        return {s: g for m in self._machines for s, g in m.store.gradients.items()}

    def _at(self, device: int) -> str:
        machine = self._machines[device]
        instructions = machine.program.lists[device]
        if machine.position >= len(instructions):
            return f"device {device} was done"
        text = print_instruction(instructions[machine.position])
        return f"device {device} was at instruction {machine.position}, {text}"

    def _explained(self, failure: Report) -> ExecutionError:
        device, cause = failure
        assert cause is not None
        machine = self._machines[device]
        instruction = machine.program.lists[device][machine.position]
        text = print_instruction(instruction)
        stage, microbatch = _place(instruction)
        line = source.of_failure(cause)
        where = f"device {device}, instruction {machine.position}: {text}"
        what = f"{type(cause).__name__}: {cause}"
        return ExecutionError(
            f"{where}{_named(stage, microbatch)} failed"
            + (f" at {line}" if line else "")
            + f" ({what}); the weights are as before the step",
            device=device,
            instruction=text,
            stage=stage,
            microbatch=microbatch,
            source=line,
        )


def _at_end(machine: Machine) -> bool:
    return machine.position == len(machine.program.lists[machine.device])


def _place(instruction: Instruction) -> tuple[int | None, int | None]:
    buffer = getattr(instruction, "buffer", None)
    if buffer is not None:
        here = isinstance(instruction, Load | Receive | Pop)
        return (buffer.target if here else buffer.source), buffer.microbatch
    return getattr(instruction, "stage", None), getattr(instruction, "microbatch", None)


def _named(stage: int | None, microbatch: int | None) -> str:
    parts = [] if stage is None else [f"stage {stage}"]
    parts += [] if microbatch is None else [f"micro-batch {microbatch}"]
    return f" ({', '.join(parts)})" if parts else ""
