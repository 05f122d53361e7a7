"""The interpreter: one dispatch table and one loop over a device's instructions.

It decides nothing. Each instruction has a function below; ``Channels`` of the backend move values
between devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fxpipe.ir import instruction as ins
from fxpipe.ir.plan import Stage
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer, own_buffer
from fxpipe.kernels.graph import laid_out
from fxpipe.kernels.kernel import ForwardResult, Kernel
from fxpipe.kernels.recompute import recomputing
from fxpipe.runtime import copies, offload, own_task
from fxpipe.runtime.host import Job
from fxpipe.runtime.ranks import summing
from fxpipe.runtime.weights import clipping

if TYPE_CHECKING:
    from fxpipe.runtime.devices.backend import Channels
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
        laid: stage → the version of its parameters that was laid out in the kernel's strides in
            this step, with the strides, and these parameters.
    """

    def __init__(self) -> None:
        self.values: dict[Buffer, Any] = {}
        self.gradients: dict[tuple[int, int], list[Tensor | None]] = {}
        self.state: dict[str, Tensor] = {}
        self.kept: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()
        self.laid: dict[int, tuple[object, Sequence[Tensor]]] = {}

    def keep(self, buffer: Buffer, saved: list[Any]) -> None:
        """Store what a forward saved, and count its micro-batch as kept."""
        self.values[buffer] = saved
        stage = buffer.source
        self.kept[stage] += 1
        self.peak[stage] = max(self.peak[stage], self.kept[stage])

    def take(self, buffer: Buffer) -> list[Any]:
        """Remove and return what a backward reads last; its micro-batch is kept no more."""
        self.kept[buffer.source] -= 1
        saved: list[Any] = self.values.pop(buffer)
        return saved

    def age(self, steps: int) -> None:
        """Renumber batches relative to a step so many later."""
        self.laid.clear()
        if steps:
            self.values = {b._replace(batch=b.batch - steps): v for b, v in self.values.items()}
            self.gradients = {(s, batch - steps): g for (s, batch), g in self.gradients.items()}

    def clear(self) -> None:
        self.laid.clear()
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
        instructions = self.program.lists[self.device]
        overlaps = self.program.depth > 0
        end = len(instructions) if end is None else end
        while self.position < end:
            instruction = instructions[self.position]
            if self.channels.stopping:
                raise Stopped
            if not overlaps or self.step + ins.batch_of(instruction) in self.batches:
                if self.times is None:
                    HANDLERS[type(instruction)](self, instruction)
                else:
                    start = perf_counter_ns()
                    HANDLERS[type(instruction)](self, instruction)
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

    def weights_of(
        self, forward: ins.Forward | ins.Recompute
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """A forward's parameters, in its kernel's strides, and buffers as before the run."""
        stage, version, laid = forward.stage, forward.version, self.store.laid
        if self.program.copies:
            weights, buffers = copies.weights(self, stage, version)
        else:
            weights = self.weights.parameters(stage, self.step + version)
            buffers = self.weights.buffers(stage)
        strides = self.kernel(stage, forward.microbatch, forward.batch).parameter_strides
        if not strides:
            return weights, buffers
        if stage not in laid or laid[stage][0] != (version, strides):
            laid[stage] = (version, strides), laid_out(weights, strides)
        return laid[stage][1], buffers

    def store_away(self, memories: list[Tensor]) -> offload.OffloadMemory:
        """Begin to copy memory out of the device."""
        return offload.FileMemory(self.device, memories)

    def named(self, buffer: Buffer) -> Buffer:
        """The buffer with its absolute batch number, as other devices name it."""
        return buffer._replace(batch=self.step + buffer.batch) if self.step else buffer


def _load(machine: Machine, instruction: ins.Load) -> None:
    buffer = instruction.buffer
    machine.store.values[buffer] = machine.jobs[machine.step + buffer.batch].host.give(buffer)


def _output(machine: Machine, instruction: ins.Output) -> None:
    buffer = instruction.buffer
    host, value = machine.jobs[machine.step + buffer.batch].host, machine.store.values[buffer]
    host.take(buffer, value)
    if host.wants(buffer):
        machine.channels.publish(machine.named(buffer), value)


def _send(machine: Machine, instruction: ins.Send | ins.Stash) -> None:
    value = machine.store.values[instruction.buffer]
    program = machine.program
    target = program.placement[instruction.buffer.target]
    destination = program.destination(instruction) if program.copies else target
    machine.channels.put(destination, machine.named(instruction.buffer), value)


def _receive(machine: Machine, instruction: ins.Receive | ins.Pop) -> None:
    value = machine.channels.get(machine.device, machine.named(instruction.buffer))
    machine.store.values[instruction.buffer] = value


def _forward(machine: Machine, instruction: ins.Forward) -> None:
    stage, i, batch = instruction.stage, instruction.microbatch, instruction.batch
    store, (weights, before) = machine.store, machine.weights_of(instruction)
    arguments = zip(machine.stages[stage].buffers, before, strict=True)
    # what earlier micro-batches of this run wrote, else the model's
    buffers = [store.state.get(argument.target, buffer) for argument, buffer in arguments]
    if instruction.again:
        store.values[own_buffer("state", stage, i, batch)] = list(buffers)
    result = _run_forward(machine, instruction, weights, buffers)
    operands = machine.program.operands[stage, i, batch]
    for consumers, value in zip(operands.outputs, result.outputs, strict=True):
        for buffer in consumers:
            store.values[buffer] = value
    for write, value in zip(machine.stages[stage].writes, result.writes, strict=True):
        store.state[write.target] = value
    if instruction.keeps:
        store.keep(operands.saved, result.saved)


def _recompute(machine: Machine, instruction: ins.Recompute) -> None:
    stage, i, batch = instruction.stage, instruction.microbatch, instruction.batch
    away = (stage, i) in machine.program.offloads  # with buffers and inputs
    kept = machine.store.values.pop(own_buffer("fetched" if away else "state", stage, i, batch))
    count = len(machine.stages[stage].buffers)
    with recomputing():
        weights, _ = machine.weights_of(instruction)
        result = _run_forward(machine, instruction, weights, kept[:count], kept[count:])
    machine.store.keep(machine.program.operands[stage, i, batch].saved, result.saved)


def _run_forward(
    machine: Machine,
    instruction: ins.Forward | ins.Recompute,
    weights: Sequence[Tensor],
    buffers: Sequence[Tensor],
    fetched: Sequence[Any] = (),
) -> ForwardResult:
    stage, i, batch = instruction.stage, instruction.microbatch, instruction.batch
    program, values = machine.program, machine.store.values
    inputs = [*fetched] or [values[buffer] for buffer in program.operands[stage, i, batch].inputs]
    with copies.turn(machine, stage) if program.copies else nullcontext():
        return machine.kernel(stage, i, batch).forward(weights, buffers, inputs)


def _backward(machine: Machine, instruction: ins.Backward) -> None:
    stage, i, batch = instruction.stage, instruction.microbatch, instruction.batch
    operands, store = machine.program.operands[stage, i, batch], machine.store
    kept = store.take(operands.kept)
    kernel, totals = machine.kernel(stage, i, batch), _totals(machine, instruction)
    if instruction.rest:
        inputs, sums = kernel.partial_backward("B", -1, kept, totals)
    else:
        inputs, sums = kernel.backward(kept, _output_gradients(machine, instruction), totals)
    store.gradients[stage, batch] = sums
    store.values.update(zip(operands.returned, inputs, strict=True))


def _partial_backward(machine: Machine, instruction: ins.PartialBackward) -> None:
    stage, i, batch = instruction.stage, instruction.microbatch, instruction.batch
    kind, bucket, store = instruction.kind, instruction.bucket, machine.store
    kept = machine.program.operands[stage, i, batch].kept
    buffer = kept if kind == "B" else own_buffer("deferred", stage, i, batch)
    left = store.values[buffer]
    if kind == "B" and bucket == 0:
        left += _output_gradients(machine, instruction)
    kernel, totals = machine.kernel(stage, i, batch), _totals(machine, instruction)
    store.values[buffer], sums = kernel.partial_backward(kind, bucket, left, totals)
    complete: list[Tensor | None] = [None] * len(sums)
    for index in machine.stages[stage].buckets[bucket].parameters:
        complete[index], sums[index] = sums[index], None
    store.gradients[stage, batch] = sums
    summing.between(machine).reduce_scatter(stage, machine.step + batch, complete, bucket)


def _input_grad(machine: Machine, instruction: ins.InputGrad) -> None:
    stage, i, batch = instruction.stage, instruction.microbatch, instruction.batch
    operands, values = machine.program.operands[stage, i, batch], machine.store.values
    kept = values.pop(operands.kept)  # counts as kept until the weight gradient
    kernel = machine.kernel(stage, i, batch)
    result = kernel.input_grad(kept, _output_gradients(machine, instruction))
    values.update(zip(operands.returned, result.inputs, strict=True))
    values[own_buffer("deferred", stage, i, batch)] = result.deferred


def _weight_grad(machine: Machine, instruction: ins.WeightGrad) -> None:
    stage, i, batch = instruction.stage, instruction.microbatch, instruction.batch
    left = machine.store.take(own_buffer("deferred", stage, i, batch))
    kernel, totals = machine.kernel(stage, i, batch), _totals(machine, instruction)
    if instruction.rest:
        _, machine.store.gradients[stage, batch] = kernel.partial_backward("W", -1, left, totals)
    else:
        machine.store.gradients[stage, batch] = kernel.weight_grad(left, totals)


def _totals(
    machine: Machine, instruction: ins.Backward | ins.PartialBackward | ins.WeightGrad
) -> Sequence[Tensor | None]:
    """The gradients summed over the batch's earlier micro-batches, see ``Weights.started``."""
    totals = machine.store.gradients.get((instruction.stage, instruction.batch))
    if totals is not None:
        return totals
    if machine.program.copies and machine.device != machine.program.placement[instruction.stage]:
        return ()  # this device has a copy of the stage
    return machine.weights.started(instruction.stage)


def _output_gradients(
    machine: Machine, instruction: ins.Backward | ins.PartialBackward | ins.InputGrad
) -> list[Tensor]:
    """For each output of the stage that gets a gradient: the sum over its consumers."""
    key = instruction.stage, instruction.microbatch, instruction.batch
    groups, values = machine.program.operands[key].gradients, machine.store.values
    return [reduce(add, [values[buffer] for buffer in group]) for group in groups]


def _free(machine: Machine, instruction: ins.Free) -> None:
    if instruction.buffer.kind in ("saved", "state"):
        offload.finish(machine, instruction)
    del machine.store.values[instruction.buffer]


def _barrier(machine: Machine, instruction: ins.Barrier) -> None:
    machine.weights.arrive()
    machine.channels.meet()


def _pause(machine: Machine, instruction: ins.Pause) -> None:
    """Do nothing: the loop returns to the caller."""


def _update(machine: Machine, instruction: ins.Update) -> None:
    stage, step = instruction.stage, machine.step
    gradients = machine.store.gradients.pop((stage, instruction.batch), [])
    parts = machine.weights.update(stage, step + instruction.reads, gradients)
    if stage in machine.program.sharded:
        summing.between(machine).give_weights(stage, step + instruction.batch, parts)


HANDLERS: Mapping[type[ins.Instruction], Callable[[Machine, Any], None]] = {
    ins.Load: _load,
    ins.Output: _output,
    ins.Send: _send,
    ins.Stash: _send,
    ins.Receive: _receive,
    ins.Pop: _receive,
    ins.Offload: offload.begin,
    ins.Prefetch: offload.prefetch,
    ins.Await: offload.await_,
    ins.Forward: _forward,
    ins.Recompute: _recompute,
    ins.PartialBackward: _partial_backward,
    ins.Backward: _backward,
    ins.InputGrad: _input_grad,
    ins.WeightGrad: _weight_grad,
    ins.Run: own_task.run,
    ins.ReduceScatter: summing.reduce_scatter,
    ins.AllGather: summing.take_sums,
    ins.TakePart: summing.take_sums,
    ins.GatherWeights: summing.gather_weights,
    ins.Share: copies.share,
    ins.Give: copies.give,
    ins.Add: copies.add,
    ins.Norm: clipping.share_norms,
    ins.Clip: clipping.clip,
    ins.Free: _free,
    ins.Barrier: _barrier,
    ins.Pause: _pause,
    ins.Update: _update,
}
"""The function that runs each kind of instruction."""
