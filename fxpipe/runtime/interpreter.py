"""The interpreter: one loop over a device's instructions.

It decides nothing. Each instruction runs as its class says; ``Channels`` of the backend move values
between devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Stage, ValueSpec
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer, own_buffer
from fxpipe.kernels.kernel import Kernel
from fxpipe.runtime.host import Job

if TYPE_CHECKING:
    from fxpipe.runtime.backend import Channels
    from fxpipe.runtime.weights.live import Weights


class Stopped(Exception):
    """Another device failed, or the caller interrupted: leave the list where it is."""


class Store:
    """The values on one device during one run. After the run, only committed values are left.

    Attributes:
        values: the live buffers.
        gradients: stage and batch → the sums of its parameters' gradients so far, None where there
            is none yet.
        state: name in the model → the newest value of a buffer that this run has written.
        kept: stage → the number of micro-batches whose backward is not finished.
        peak: stage → the most micro-batches that were kept at once.
        busy: a buffer whose memory is being read → what waits for the end of that.
    """

    def __init__(self) -> None:
        self.values: dict[Buffer, Any] = {}
        self.gradients: dict[tuple[int, int], list[Tensor | None]] = {}
        self.state: dict[str, Tensor] = {}
        self.kept: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()
        self.busy: dict[Buffer, Callable[[], None]] = {}

    def keep(self, buffer: Buffer, saved: list[Any]) -> None:
        """Store what a forward saved, and count its micro-batch as kept."""
        self.values[buffer] = saved
        stage = buffer.source
        self.kept[stage] += 1
        self.peak[stage] = max(self.peak[stage], self.kept[stage])

    def hand_out(self, buffers: Iterable[Iterable[Buffer]], values: Iterable[Any]) -> None:
        """Store each value in a buffer for each of its consumers."""
        for consumers, value in zip(buffers, values, strict=True):
            for buffer in consumers:
                self.values[buffer] = value

    def take(self, buffer: Buffer) -> list[Any]:
        """Remove and return what a backward reads last; its micro-batch is kept no more."""
        self.kept[buffer.source] -= 1
        saved: list[Any] = self.values.pop(buffer)
        return saved

    def drop(self, buffer: Buffer) -> None:
        """Remove a buffer, once what still reads its memory has done so."""
        if buffer in self.busy:
            self.busy.pop(buffer)()
        del self.values[buffer]

    def age(self, steps: int) -> None:
        """Renumber batches relative to a step so many later."""
        if steps:
            self.values = {b._replace(batch=b.batch - steps): v for b, v in self.values.items()}
            self.busy = {b._replace(batch=b.batch - steps): v for b, v in self.busy.items()}
            self.gradients = {(s, batch - steps): g for (s, batch), g in self.gradients.items()}

    def clear(self) -> None:
        self.busy.clear()
        self.values.clear()
        self.gradients.clear()
        self.state.clear()


@dataclass
class Machine:
    """One device in one run.

    Instructions number batches and versions relative to the current step; jobs, channels and
    weights have absolute numbers.

    Attributes:
        program: the program that runs.
        device: the index of the list that this machine runs.
        stages: the plan's stages.
        jobs: batch → what the run needs for it.
        channels: the channels to the other devices.
        weights: parameters and buffers.
        store: the values on the device.
        position: the index of the instruction that is next, or running.
        step: the number of the step that is running.
        batches: the batches that exist; instructions of other batches are skipped.
        times: gets the start and end of each instruction, which the backend turns into
            nanoseconds; None to take no times.
    """

    program: Program
    device: int
    stages: Sequence[Stage]
    jobs: Mapping[int, Job]
    channels: Channels
    weights: Weights
    store: Store = field(default_factory=Store)
    position: int = 0
    step: int = 0
    batches: range = range(1)
    times: list[Any] | None = None

    def run(self, end: int | None = None) -> bool:
        """Run the list from ``position`` to ``end``, by default the list's end.

        Returns:
            True at the end, False at a pause, after which it can be called again.

        Raises:
            Stopped: another device failed, or the run was stopped.
        """
        self.channels.prepare(self)
        instructions = self.program.lists[self.device]
        overlaps = self.program.depth > 0
        end = len(instructions) if end is None else end
        while self.position < end:
            instruction = instructions[self.position]
            if self.channels.stopping:
                raise Stopped
            if not overlaps or self.step + instruction.batch in self.batches:
                start = 0 if self.times is None else perf_counter_ns()
                watched = HANDLERS.get(type(instruction))
                if watched is None:
                    instruction.run(self)
                else:
                    watched(self, instruction)
                if self.times is not None:
                    self.times += start, perf_counter_ns()
            self.position += 1
            if type(instruction) is ins.Pause:
                return False
        return True

    @property
    def at_end(self) -> bool:
        return self.position == len(self.program.lists[self.device])

    def begin(self, step: int, batches: range) -> None:
        """Prepare to run the list of another step; values of batches in flight are kept."""
        self.store.age(step - self.step)
        self.step, self.batches, self.position = step, batches, 0

    def kernel(self, stage: int, microbatch: int, batch: int) -> Kernel:
        """The kernel that runs a stage for a micro-batch."""
        return self.jobs[self.step + batch].kernels[microbatch][stage]

    def held(self, stage: int, version: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """A stage's parameters of a version, and its buffers as before the run, on this device."""
        home = self.weights.parameters(stage, self.step + version), self.weights.buffers(stage)
        if not self.program.copies or self.device not in self.program.copies_of(stage):
            return home
        parameters, buffers = self.store.values[own_buffer("weights", stage, self.device, version)]
        for parameter, like in zip(parameters, home[0], strict=True):
            parameter.requires_grad_(like.requires_grad)  # not sent from one rank to another
        return parameters, buffers

    def totals(self, x: ins.Compute | ins.OncePerStep) -> Sequence[Tensor | None]:
        """A stage's gradients so far in a batch, see ``Weights.started``."""
        totals = self.store.gradients.get((x.stage, x.batch))
        if totals is not None:
            return totals
        if self.program.copies and self.device in self.program.copies_of(x.stage):
            return ()  # the sums of its home device begin where earlier steps have ended
        return self.weights.started(x.stage)

    def room(self, spec: ValueSpec) -> Tensor:
        """Allocate the device's memory for a value."""
        return spec.room(torch.device("cpu"))

    def posting(self, source: int) -> AbstractContextManager[None]:
        """Inside, receives from another device are posted."""
        return nullcontext()

    def named(self, buffer: Buffer) -> Buffer:
        """The buffer with its absolute batch number, as other devices name it."""
        return buffer._replace(batch=self.step + buffer.batch) if self.step else buffer


Handler = Callable[[Machine, Any], None]
"""Runs an instruction on a machine."""


def run_own(machine: Machine, instruction: ins.Instruction) -> None:
    """Run an instruction as its class says."""
    instruction.run(machine)


HANDLERS: dict[type[ins.Instruction], Handler] = {}
"""What runs instructions of a kind in place of their own ``run``, where somebody watches them."""
