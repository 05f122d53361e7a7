"""A small executor that finds what a program computes, for tests of the verifier.

It shares only data classes with the library. A tensor is a number that stands for how it was
computed: equal numbers mean the same operations on the same inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.task import KINDS
from fxpipe.ir.value import HOST, Buffer, BufferKind, Edge, norm_buffer
from tests.oracles.program_devices import Devices, WrongError
from tests.oracles.symbolic_loop import Model, tensor


def steps_to_tell(program: Program) -> int:
    """How many steps it takes until a window has shown all of its behaviour."""
    versions = [getattr(x, "version", 0) for own in program.lists for x in own]
    overlap = program.depth - min(versions, default=0)
    return overlap + 2 if overlap else 1


def program_is_right(program: Program, expected: Model, steps: int = 1) -> bool:
    """Whether a program computes ``expected``, whichever device runs ahead of the others."""
    try:
        return all(
            _Run(program, favourite, steps).gives(expected) for favourite in range(program.devices)
        )
    except WrongError:
        return False


class _Run(Devices):
    """One run of some steps and the flush, in which a favourite device runs whenever it can."""

    def __init__(self, program: Program, favourite: int, steps: int) -> None:
        super().__init__(program)
        self.summed: set[tuple[int, int]] = set()
        self.apart: set[tuple[int, int]] = set()  # stages' versions with parts not yet gathered
        self.begun: dict[tuple[int, int], tuple[str | None, int, int, int]] = {}
        self.complete: set[tuple[int, int]] = set()  # stages' sums that lack the last reduce
        self.copied: dict[tuple[int, int, int], list[int]] = {}
        self.sums: dict[int, list[int]] = {}
        instructions = [x for own in program.lists for x in own]
        self.updates = any(isinstance(x, ins.Update) for x in instructions)
        self.flush = any(isinstance(x, ins.Barrier) for x in instructions)
        order = [favourite, *(d for d in range(program.devices) if d != favourite)]
        for self.step in range(steps + program.depth):
            self.lists = [
                [x for x in own if 0 <= self.step + _batch(x) < steps] for own in program.lists
            ]
            self.next = [0] * program.devices
            self.met = [0] * program.devices
            self.resumed = not any(isinstance(x, ins.Pause) for x in instructions)
            self.backwards = sum(
                isinstance(x, ins.Backward | ins.WeightGrad) for own in self.lists for x in own
            )
            while any(map(self._advance, order)):  # the favourite again after each
                pass
            if any(at < len(own) for at, own in zip(self.next, self.lists, strict=True)):
                raise WrongError("stuck")
            if not self.updates and steps > 1 and self.step < steps:
                for stage in range(program.stages):
                    self.model.update(stage, self.step, self.step, self.step + 1)
        left = self.summed or self.apart or self.copied or self.begun or self.complete
        if any(self.memory) or any(self.wires.values()) or left:
            raise WrongError("something is left")

    def gives(self, expected: Model) -> bool:
        """Whether the run has computed ``expected``; user-defined tasks may be left out."""
        seen = self.model.seen.items() <= expected.seen.items()
        return seen and replace(self.model, seen=expected.seen) == expected

    def _advance(self, device: int) -> bool:
        """Run the next instruction of a device; returns False if there is none or it must wait."""
        own = self.lists[device]
        if self.next[device] == len(own) or not self._execute(device, own[self.next[device]]):
            return False
        self.next[device] += 1
        return True

    def _execute(self, device: int, instruction: ins.Instruction) -> bool:
        match instruction:
            case ins.Load() | ins.Output() | ins.Send() | ins.Receive() | ins.Free():
                buffer = instruction.buffer
                if self.step:
                    buffer = buffer._replace(batch=self.step + buffer.batch)
                return self._move(device, instruction, buffer)
            case ins.Move(opcode="offload" | "prefetch" | "await"):
                self._offload(device, instruction)
            case ins.Barrier() | ins.Pause():
                return self._meet(device, instruction)
            case ins.Update(stage, reads, writes, batch):
                reads, writes = self.step + reads, self.step + writes
                self._check(device, stage, reads)
                self._there(stage, self.step + batch)
                if (self.flush and self.backwards) or (stage, writes) in self.model.weights:
                    raise WrongError("weights change too early, or twice")
                self.model.update(stage, self.step + batch, reads, writes)
                if "gather_weights" in self.program.opcodes:
                    self.apart.add((stage, writes))
            case ins.Instruction(opcode="run" | "run_each", batch=batch, stage=stage):
                own: Any = instruction
                kind, i, version = own.kind, getattr(own, "microbatch", None), own.version
                version = max(self.step + version, 0)
                self._check(device, stage, version)
                self._whole(stage, version)
                if "gradients" in KINDS[kind].reads:
                    self._there(stage, self.step + batch)
                if (kind, stage, i, self.step + batch) in self.model.seen:
                    raise WrongError("runs twice")
                self.model.look(kind, stage, i, self.step + batch, version)
            case ins.OncePerStep(stage, batch, opcode="reduce_scatter"):
                batch += self.step
                self._at_home(device, stage)
                if (stage, batch) in self.summed or (stage, batch) in self.begun:
                    raise WrongError("summed twice at once, or before a backward is finished")
                self.complete.discard((stage, batch))
                self.summed.add((stage, batch))
            case ins.OncePerStep(stage, batch, opcode="all_gather"):
                batch += self.step
                self._at_home(device, stage)
                if (stage, batch) not in self.summed:
                    raise WrongError("nothing is being summed")
                self.summed.remove((stage, batch))
                self.model.reduce(stage, batch)
            case ins.OncePerStep(stage, batch, opcode="gather_weights"):
                self._at_home(device, stage)
                if (stage, self.step + batch + 1) not in self.apart:
                    raise WrongError("there are no parts of new weights")
                self.apart.remove((stage, self.step + batch + 1))
            case ins.OncePerStep(stage, batch, opcode="share"):
                self._at_home(device, stage)
                value = self.model.weights.get((stage, self.step + batch), 0)
                for copy in self._copies(stage):
                    self._write(device, self._copied("weights", stage, copy, batch), value)
            case ins.Instruction(opcode="give", stage=stage, batch=batch):
                copy = getattr(instruction, "copy", -1)
                if copy != device or copy not in self._copies(stage):
                    raise WrongError("there is no such copy here")
                if (stage, device, self.step + batch) not in self.copied:
                    raise WrongError("it has no gradients")
                summed = self.copied.pop((stage, device, self.step + batch))
                value = tensor("sums", *summed)
                self.sums[value] = summed
                self._write(device, self._copied("sums", stage, copy, batch), value)
            case ins.OncePerStep(stage, batch, opcode="add"):
                self._at_home(device, stage)
                for copy in self._copies(stage):
                    given = self._read(device, self._copied("sums", stage, copy, batch))
                    if given not in self.sums:
                        raise WrongError("it is no sum of gradients")
                    self.model.take(stage, self.step + batch, self.sums[given])
            case ins.OncePerStep(stage, batch, opcode="norm"):
                self._there(stage, self.step + batch)
                batch += self.step
                self._at_home(device, stage)
                for other in range(self.program.stages):
                    buffer = norm_buffer(stage, other, batch)
                    self._write(device, buffer, self.model.norm(stage, batch))
            case ins.OncePerStep(stage, batch, opcode="clip"):
                self._there(stage, self.step + batch)
                batch += self.step
                self._at_home(device, stage)
                buffers = [norm_buffer(s, stage, batch) for s in range(self.program.stages)]
                norms = [self._read(device, buffer) for buffer in buffers]
                self.model.clip(stage, batch, norms)
            case ins.Compute():
                version = max(self.step + instruction.version, 0)
                self._check(device, instruction.stage, version)
                self._whole(instruction.stage, version)
                self._compute(device, instruction, version, self.step + instruction.batch)
        return True

    def _compute(self, device: int, instruction: ins.Compute, version: int, batch: int) -> None:
        stage, i = instruction.stage, instruction.microbatch
        edges, gradients = self.program.edges, self.program.gradients
        memory = self.memory[device]

        def own(kind: BufferKind) -> Buffer:
            return Buffer(kind, "", stage, stage, i, batch)

        def take(kind: BufferKind) -> int:
            value = self._read(device, own(kind))
            del memory[own(kind)]
            return value

        def back(e: Edge) -> Buffer:
            return Buffer("grad", e.value, e.source, e.target, i, batch)

        away = (stage, i) in self.away
        kept: BufferKind = "fetched" if away and (stage, i) not in self.again else "saved"
        begun = self.begun.pop((stage, batch), None)
        here = _kind(instruction)
        if begun is not None and begun[:3] != (here, i, version):
            raise WrongError("a backward is not finished")
        match instruction:
            case ins.Compute(opcode="partial_backward"):
                bucket: int = getattr(instruction, "bucket", 0)
                if bucket != (0 if begun is None else begun[3] + 1):
                    raise WrongError("another bucket is next")
                self._at_home(device, stage)
                self._there(stage, batch)
                if here not in ("B", "W"):
                    raise WrongError("there is no such backward")
                self._read(device, own(kept if here == "B" else "deferred"))
                for e in gradients:
                    if here == "B" and e.target == stage:
                        self._read(device, back(e))
                self.begun[stage, batch] = here, i, version, bucket
                return
            case ins.Backward() | ins.WeightGrad():
                if _is_rest(instruction) != (begun is not None):
                    raise WrongError("it runs another part of a backward")
        match instruction:
            case ins.Recompute() if away:
                inputs = self.inputs[take("fetched")]
                again = tensor("forward", self.model.weights[stage, version], *inputs)
                self._write(device, own("saved"), again)
                return
            case ins.Forward() | ins.Recompute():
                inputs = [
                    self._read(device, Buffer(e.kind, e.value, e.source, e.target, i, batch))
                    for e in edges
                    if e.target == stage
                ]
                if isinstance(instruction, ins.Recompute):
                    take("state")
                    again = tensor("forward", self.model.weights[stage, version], *inputs)
                    self._write(device, own("saved"), again)
                    return
                copies = self._copies(stage)
                copy = 1 + copies.index(device) if device in copies else 0
                made = self.model.forward(stage, version, inputs, copy)
                for e in edges:
                    if e.source == stage:
                        buffer = Buffer(e.kind, e.value, e.source, e.target, i, batch)
                        self._write(device, buffer, tensor(made, e.value))
                if instruction.keeps:
                    self._write(device, own("saved"), made)
                if instruction.again:
                    self._write(device, own("state"), made)
            case ins.Backward() | ins.InputGrad():
                forward = take(kept)
                arriving = [self._read(device, back(e)) for e in gradients if e.target == stage]
                found = self.model.gradient(stage, version, forward, arriving)
                for e in gradients:
                    if e.source == stage:
                        self._write(device, back(e), tensor(found, e.value))
                if isinstance(instruction, ins.InputGrad):
                    self._write(device, own("deferred"), found)
                else:
                    self._add(device, stage, batch, found, version)
            case ins.WeightGrad():
                self._add(device, stage, batch, take("deferred"), version)
        if begun is not None:
            self.complete.add((stage, batch))

    def _there(self, stage: int, batch: int) -> None:
        """Check that a stage's gradients are not in flight between the replicas."""
        if (stage, batch) in self.summed | self.complete | self.begun.keys():
            raise WrongError("its gradients are being summed")

    def _add(self, device: int, stage: int, batch: int, found: int, version: int) -> None:
        self._there(stage, batch)
        self.backwards -= 1
        copied = device in self._copies(stage)
        to = self.copied.setdefault((stage, device, batch), []) if copied else None
        self.model.add(stage, batch, found, version, to)

    def _meet(self, device: int, instruction: ins.Barrier | ins.Pause) -> bool:
        """Whether all devices have reached their meeting of this number."""
        number = self.met[device]
        for other, own in enumerate(self.lists):
            meetings = [k for k, x in enumerate(own) if isinstance(x, ins.Barrier | ins.Pause)]
            if number >= len(meetings) or self.next[other] < meetings[number]:
                return False
            if type(own[meetings[number]]) is not type(instruction):
                raise WrongError("a barrier meets a pause")
        self.met[device] += 1
        if isinstance(instruction, ins.Pause):
            expected = {
                (e.value, i, self.step)
                for e in self.program.edges
                if e.target == HOST
                for i in range(self.program.microbatches)
            }
            given = {
                (value, i, batch)
                for value, _, gradient, i, batch in self.model.given
                if not gradient
            }
            if expected - given:
                raise WrongError("the caller has not got all outputs at the pause")
            self.resumed = True
        return True

    def _check(self, device: int, stage: int, version: int) -> None:
        if (stage, version) not in self.model.weights:
            raise WrongError("there are no such weights")
        if device in self._copies(stage):
            given = self._read(device, self._copied("weights", stage, device, 0))
            if given != self.model.weights[stage, version]:
                raise WrongError("its copy has other weights")
        elif self.program.placement[stage] != device:
            raise WrongError("there are no such weights on this device")

    def _whole(self, stage: int, version: int) -> None:
        if (stage, version) in self.apart:
            raise WrongError("there are only parts of these weights")


def _batch(instruction: ins.Instruction) -> int:
    if hasattr(instruction, "buffer"):
        return int(instruction.buffer.batch)
    return int(getattr(instruction, "batch", 0))


def _kind(instruction: ins.Compute) -> str | None:
    """The letter of an instruction that runs a part of a backward."""
    if instruction.opcode == "partial_backward":
        return str(getattr(instruction, "kind", ""))
    return instruction.letter if _is_rest(instruction) else None


def _is_rest(instruction: ins.Compute) -> bool:
    """Whether it runs the rest of a backward."""
    return instruction.opcode in ("rest_backward", "rest_weight_grad")
