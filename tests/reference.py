"""Small executors that say what a schedule or a program computes, for tests of the verifiers.

They share nothing with the library but its data. A tensor is a number that stands for how it was
computed: two are equal when they come from the same operations on the same inputs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from fxpipe.edge import HOST, Edge
from fxpipe.program import (
    Backward,
    Barrier,
    Buffer,
    Forward,
    Free,
    Instruction,
    Load,
    Output,
    Pause,
    Pop,
    Program,
    Receive,
    Send,
    Stash,
    Update,
)
from fxpipe.schedule import Schedule


class WrongError(Exception):
    """What ran is not a step."""


def tensor(*origin: object) -> int:
    """The tensor that an operation makes."""
    return hash(origin)


@dataclass
class Model:
    """The state of all stages, and what the caller got.

    Attributes:
        weights: (stage, version) → weights.
        gradients: stage → what its backwards added, in order.
        statistics: stage → what its forwards wrote, in order.
        given: (value, the stage it comes from, whether it is a gradient, micro-batch) → what the
            caller got; each stage that reads an input gives a gradient of its own.
    """

    weights: dict[tuple[int, int], int] = field(default_factory=dict)
    gradients: dict[int, list[int]] = field(default_factory=dict)
    statistics: dict[int, list[int]] = field(default_factory=dict)
    given: dict[tuple[str, int, bool, int], int] = field(default_factory=dict)

    @staticmethod
    def fresh(stages: int) -> Model:
        return Model(
            {(stage, 0): tensor("weights", stage) for stage in range(stages)},
            {stage: [] for stage in range(stages)},
            {stage: [] for stage in range(stages)},
        )

    def forward(self, stage: int, version: int, inputs: list[int]) -> int:
        """What a forward saves; its outputs follow from that."""
        kept = tensor("forward", self.weights[stage, version], *inputs)
        self.statistics[stage].append(kept)
        return kept

    def backward(self, stage: int, version: int, kept: int, gradients: list[int]) -> int:
        """What a backward adds; the gradients of its inputs follow from that."""
        added = tensor("backward", self.weights[stage, version], kept, *gradients)
        self.gradients[stage].append(added)
        return added

    def update(self, stage: int, reads: int, writes: int) -> None:
        weights = self.weights[stage, reads]
        self.weights[stage, writes] = tensor("update", weights, *self.gradients[stage])


def plain_loop(
    stages: int, edges: tuple[Edge, ...], microbatches: int, *, trains: bool, updates: bool
) -> Model:
    """A step on one device: micro-batch after micro-batch, stage after stage, and back."""
    model = Model.fresh(stages)
    for i in range(microbatches):
        values = {e.value: tensor("caller", e.value, i) for e in edges if e.source == HOST}
        kept = {}
        for stage in range(stages):
            inputs = [values[e.value] for e in edges if e.target == stage]
            kept[stage] = model.forward(stage, 0, inputs)
            values |= {e.value: tensor(kept[stage], e.value) for e in edges if e.source == stage}
        model.given |= {
            (e.value, e.source, False, i): values[e.value] for e in edges if e.target == HOST
        }
        if not trains:
            continue
        back = {e: tensor("gradient", e.value, i) for e in edges if e.target == HOST}
        for stage in reversed(range(stages)):
            arriving = [back[e] for e in edges if e.source == stage and e.gradient]
            added = model.backward(stage, 0, kept[stage], arriving)
            back |= {e: tensor(added, e.value) for e in edges if e.target == stage}
        model.given |= {
            (e.value, e.target, True, i): back[e] for e in edges if e.source == HOST and e.gradient
        }
    if updates:
        for stage in range(stages):
            model.update(stage, 0, 1)
    return model


def program_is_right(program: Program, expected: Model) -> bool:
    """Whether a program computes this, whichever device is ahead of the others."""
    try:
        return all(
            _Run(program, favourite).model == expected for favourite in range(program.devices)
        )
    except WrongError:
        return False


class _Run:
    """One run of a program; the favourite device goes on whenever it can."""

    def __init__(self, program: Program, favourite: int) -> None:
        self.program = program
        self.model = Model.fresh(program.stages)
        self.memory: list[dict[Buffer, int]] = [{} for _ in program.lists]
        self.wires: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.next = [0] * program.devices
        self.met = [0] * program.devices
        self.loaded: set[Buffer] = set()
        self.resumed = not any(isinstance(x, Pause) for own in program.lists for x in own)
        self.backwards = sum(isinstance(x, Backward) for own in program.lists for x in own)
        order = [favourite, *(d for d in range(program.devices) if d != favourite)]
        while any(self._step(device) for device in order):
            pass
        if any(at < len(own) for at, own in zip(self.next, program.lists, strict=True)):
            raise WrongError("stuck")
        if any(self.memory) or any(self.wires.values()):
            raise WrongError("something is left")

    def _step(self, device: int) -> bool:
        """Run the next instruction of a device, if there is one and it need not wait."""
        own = self.program.lists[device]
        if self.next[device] == len(own) or not self._execute(device, own[self.next[device]]):
            return False
        self.next[device] += 1
        return True

    def _execute(self, device: int, instruction: Instruction) -> bool:
        memory = self.memory[device]
        match instruction:
            case Load(buffer):
                gradient = buffer.kind == "grad"
                if gradient and not self.resumed:
                    return False
                if buffer in self.loaded:
                    raise WrongError("loaded twice")
                self.loaded.add(buffer)
                origin = "gradient" if gradient else "caller"
                self._write(device, buffer, tensor(origin, buffer.value, buffer.microbatch))
            case Output(buffer):
                key = buffer.value, buffer.source, buffer.kind == "grad", buffer.microbatch
                if key in self.model.given:
                    raise WrongError("handed over twice")
                self.model.given[key] = self._read(device, buffer)
            case Send(buffer) | Stash(buffer):
                pair = device, self.program.placement[buffer.target]
                self.wires[pair].append(self._read(device, buffer))
            case Receive(buffer) | Pop(buffer):
                wire = self.wires[self.program.placement[buffer.source], device]
                if not wire:
                    return False
                self._write(device, buffer, wire.popleft())
            case Forward(stage, i, version, keeps):
                self._compute(device, stage, version)
                edges = self.program.edges
                inputs = [
                    self._read(device, Buffer(e.kind, e.value, e.source, e.target, i))
                    for e in edges
                    if e.target == stage
                ]
                kept = self.model.forward(stage, version, inputs)
                for e in edges:
                    if e.source == stage:
                        buffer = Buffer(e.kind, e.value, e.source, e.target, i)
                        self._write(device, buffer, tensor(kept, e.value))
                if keeps:
                    self._write(device, Buffer("saved", "", stage, stage, i), kept)
            case Backward(stage, i, version):
                self._compute(device, stage, version)
                self.backwards -= 1
                back = [e for e in self.program.edges if e.gradient]
                kept = self._read(device, Buffer("saved", "", stage, stage, i))
                del memory[Buffer("saved", "", stage, stage, i)]
                arriving = [
                    self._read(device, Buffer("grad", e.value, e.target, e.source, i))
                    for e in back
                    if e.source == stage
                ]
                added = self.model.backward(stage, version, kept, arriving)
                for e in back:
                    if e.target == stage:
                        buffer = Buffer("grad", e.value, e.target, e.source, i)
                        self._write(device, buffer, tensor(added, e.value))
            case Free(buffer):
                self._read(device, buffer)
                del memory[buffer]
            case Barrier() | Pause():
                return self._meet(device, instruction)
            case Update(stage, reads, writes):
                self._compute(device, stage, reads)
                if self.backwards or (stage, writes) in self.model.weights:
                    raise WrongError("weights change too early, or twice")
                self.model.update(stage, reads, writes)
        return True

    def _meet(self, device: int, instruction: Barrier | Pause) -> bool:
        """Whether all devices have come to their meeting of this number."""
        number = self.met[device]
        for other, own in enumerate(self.program.lists):
            meetings = [k for k, x in enumerate(own) if isinstance(x, Barrier | Pause)]
            if number >= len(meetings) or self.next[other] < meetings[number]:
                return False
            if type(own[meetings[number]]) is not type(instruction):
                raise WrongError("a barrier meets a pause")
        self.met[device] += 1
        if isinstance(instruction, Pause):
            expected = {
                (e.value, i)
                for e in self.program.edges
                if e.target == HOST
                for i in range(self.program.microbatches)
            }
            if expected - {
                (value, i) for value, _, gradient, i in self.model.given if not gradient
            }:
                raise WrongError("the caller has not got all outputs at the pause")
            self.resumed = True
        return True

    def _compute(self, device: int, stage: int, version: int) -> None:
        if (stage, version) not in self.model.weights or self.program.placement[stage] != device:
            raise WrongError("there are no such weights on this device")

    def _read(self, device: int, buffer: Buffer) -> int:
        if buffer not in self.memory[device]:
            raise WrongError(f"{buffer} is not there")
        return self.memory[device][buffer]

    def _write(self, device: int, buffer: Buffer, value: int) -> None:
        if buffer in self.memory[device]:
            raise WrongError(f"{buffer} is there already")
        self.memory[device][buffer] = value


def schedule_is_right(schedule: Schedule) -> bool:
    """Whether the rows, run against each other, do what a plain loop does, and no more."""
    every = list(range(schedule.microbatches))
    last = schedule.stages - 1
    rows = [deque(row) for row in schedule.rows]
    forwards: list[list[int | None]] = [[] for _ in schedule.placement]
    backwards: list[list[int | None]] = [[] for _ in schedule.placement]
    updated = [0] * schedule.stages
    trains = schedule.trains
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(rows):
            if not row:
                continue
            task = row[0]
            s, i = task.stage, task.microbatch
            if s is None or not 0 <= s <= last or schedule.placement[s] != device:
                return False
            if task.kind == "F":
                ready = s == 0 or i in forwards[s - 1]
                forwards[s] += [i] if ready else []
            elif task.kind == "B":
                ready = i in forwards[s] and (s == last or i in backwards[s + 1])
                backwards[s] += [i] if ready else []
            elif task.kind == "U" and i is None:
                if backwards[s] != every:
                    return False
                ready = True
                updated[s] += 1
            else:
                return False
            if ready:
                row.popleft()
                moved = True
    wanted = every if trains else []
    return (
        not any(rows)
        and all(done == every for done in forwards)
        and all(done == wanted for done in backwards)
        and updated == [int(trains)] * schedule.stages
    )
