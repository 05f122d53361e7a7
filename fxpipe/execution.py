"""One run of a program on the workers: start, pause, finish or fail, and all or nothing."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from torch import Tensor

from fxpipe import source
from fxpipe.cpu import CpuWires, Worker
from fxpipe.errors import ExecutionError
from fxpipe.interpreter import Host, Machine, Stopped
from fxpipe.kernel import Kernel
from fxpipe.plan import Plan
from fxpipe.program import Instruction, Program
from fxpipe.text.instruction import print_instruction
from fxpipe.weights import LiveWeights

GRACE = 0.5
"""Seconds that the devices get to leave their lists before a failure is raised regardless; a
device that is in the middle of an instruction ends it before it starts anything else."""


class Execution:
    """A program on its way through the workers.

    ``advance`` runs it to its end or its next pause; ``commit`` then makes its results the
    model's. Until then nothing outside this object has changed, and after a failure nothing will.
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
        self._workers = workers
        self._weights = weights
        self._wires = CpuWires(program.devices)
        self._machines = [
            Machine(program, device, plan.stages, kernels, host, self._wires, weights)
            for device in range(program.devices)
        ]
        self._reports: SimpleQueue[tuple[int, bool, BaseException | None]] = SimpleQueue()

    @property
    def peak_kept(self) -> Counter[int]:
        """Stage → the most micro-batches whose saved values were alive at once."""
        return sum((machine.store.peak for machine in self._machines), Counter())

    @property
    def alive(self) -> int:
        """Buffers that are alive on all devices."""
        return sum(len(machine.store.values) for machine in self._machines)

    def advance(self) -> bool:
        """Run every device to the end of its list or its next pause.

        Returns:
            True at the end, False at a pause.

        Raises:
            ExecutionError: an instruction raised; all devices have been stopped, and the weights
                are as before the run.
            KeyboardInterrupt: as it came; the same holds.
        """
        waiting = 0
        ended = True
        failure: tuple[int, BaseException] | None = None
        try:
            for machine, worker in zip(self._machines, self._workers, strict=True):
                waiting += 1
                worker.submit(functools.partial(self._drive, machine))
            while waiting and failure is None:
                device, at_end, error = self._reports.get()
                waiting -= 1
                ended = ended and at_end
                if error is not None and not isinstance(error, Stopped):
                    failure = device, error
        except BaseException as interrupt:
            places = "; ".join(map(self._at, range(len(self._machines))))
            self._abandon(waiting)
            interrupt.add_note(f"interrupted a step, the weights are as before it: {places}")
            raise
        if failure is not None:
            device, cause = failure
            error = self._explained(device, cause)
            self._abandon(waiting)
            raise error from cause
        return ended

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Name in the model → each parameter that the program reads."""
        return self._weights.by_name

    def commit(self) -> None:
        """Make buffers and gradients the model's, and let go of everything."""
        self._whole(self._weights.commit, self._written(), self._gradients())
        for machine in self._machines:
            machine.store.clear()

    def commit_buffers(self) -> None:
        """Make what the forwards wrote the model's, at a pause."""
        self._whole(self._weights.commit, self._written(), {})
        for machine in self._machines:
            machine.store.state.clear()

    def take_gradients(self) -> dict[str, Tensor]:
        """Hand over the sums of gradients, by name in the model, and let go of everything."""
        found = self._weights.named(self._gradients())
        for machine in self._machines:
            machine.store.clear()
        return found

    def _written(self) -> dict[str, Tensor]:
        return {name: value for m in self._machines for name, value in m.store.state.items()}

    def _gradients(self) -> dict[int, list[Tensor | None]]:
        return {s: g for m in self._machines for s, g in m.store.gradients.items()}

    def _whole(self, job: Callable[..., None], *arguments: Any) -> None:
        """Run a job on a worker and wait for it: Ctrl-C cannot part it there."""
        done: SimpleQueue[BaseException | None] = SimpleQueue()

        def reported() -> None:
            try:
                job(*arguments)
                done.put(None)
            except BaseException as error:
                done.put(error)

        self._workers[0].submit(reported)
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                error = done.get()
                break
            except KeyboardInterrupt as caught:
                interrupt = caught
        if error is not None:
            raise error
        if interrupt is not None:
            raise interrupt

    def _drive(self, machine: Machine) -> None:
        """A worker's job: run one device and report."""
        try:
            self._reports.put((machine.device, machine.run(), None))
        except BaseException as error:
            if not isinstance(error, Stopped):
                self._weights.stop()
                self._wires.stop()
            self._reports.put((machine.device, True, error))

    def _abandon(self, waiting: int) -> None:
        """Stop all devices and undo. A running update is awaited, a computation only for GRACE."""
        updating = self._weights.stop()
        self._wires.stop()
        deadline = time.monotonic() + GRACE
        while waiting:
            try:
                timeout = None if updating else max(deadline - time.monotonic(), 0)
                self._reports.get(timeout=timeout)
                waiting -= 1
            except Empty:
                break
            except KeyboardInterrupt:
                continue
        self._weights.roll_back()
        if not waiting:
            for machine in self._machines:
                machine.store.clear()

    def _at(self, device: int) -> str:
        machine = self._machines[device]
        instructions = machine.program.lists[device]
        if machine.position >= len(instructions):
            return f"device {device} was done"
        text = print_instruction(instructions[machine.position])
        return f"device {device} was at instruction {machine.position}, {text}"

    def _explained(self, device: int, cause: BaseException) -> ExecutionError:
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


def _place(instruction: Instruction) -> tuple[int | None, int | None]:
    buffer = getattr(instruction, "buffer", None)
    if buffer is not None:
        stage = buffer.target if type(instruction).__name__ in ("Receive", "Pop", "Load") else None
        return (buffer.source if stage is None else stage), buffer.microbatch
    return getattr(instruction, "stage", None), getattr(instruction, "microbatch", None)


def _named(stage: int | None, microbatch: int | None) -> str:
    parts = [] if stage is None else [f"stage {stage}"]
    parts += [] if microbatch is None else [f"micro-batch {microbatch}"]
    return f" ({', '.join(parts)})" if parts else ""
