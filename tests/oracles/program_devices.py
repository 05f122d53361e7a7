"""What the devices of a program hold and send each other, for the executor of programs."""

from __future__ import annotations

from collections import defaultdict, deque

from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import HOST, Buffer, BufferKind
from tests.oracles.symbolic_loop import Model, tensor


class WrongError(Exception):
    """The program does not compute a training step."""


class Devices:
    """The memory of each device, the links between them, and the caller's side."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.model = Model.fresh(program.stages)
        self.memory: list[dict[Buffer, int]] = [{} for _ in program.lists]
        self.wires: defaultdict[tuple[int, int], deque[tuple[Buffer, int]]] = defaultdict(deque)
        self.loaded: set[Buffer] = set()
        self.step = 0
        self.resumed = False
        every = [x for own in program.lists for x in own]
        self.again = {(x.stage, x.microbatch) for x in every if isinstance(x, ins.Recompute)}
        self.away = {
            (x.buffer.source, x.buffer.microbatch)
            for x in every
            if x.opcode == "offload" and isinstance(x, ins.Move)
        }
        self.inputs: dict[int, list[int]] = {}
        self.where = {
            (x.stage, x.microbatch): device
            for device, own in enumerate(program.lists)
            for x in own
            if isinstance(x, ins.Forward) and device in self._copies(x.stage)
        }

    def _offload(self, device: int, x: ins.Move) -> None:
        """Store or fetch a value: stored values stay until freed, fetched ones arrive once."""
        buffer = x.buffer._replace(batch=self.step + x.buffer.batch)
        again = (buffer.source, buffer.microbatch) in self.again
        kept = "state" if again else "saved"
        kinds = kept, "offloaded", "fetching", "fetched"
        number = ["offload", "prefetch", "await"].index(x.opcode)
        if buffer.kind != kinds[number + 1]:
            raise WrongError("it makes something else")
        value = self._read(device, buffer._replace(kind=kinds[number]))
        if x.opcode == "offload":
            inputs = [
                self._read(device, Buffer(e.kind, e.value, e.source, e.target, *buffer[4:]))
                for e in self.program.edges
                if e.target == buffer.source and (again or e.source == HOST)
            ]
            if again:
                value = tensor("inputs", *inputs)
                self.inputs[value] = inputs
        else:
            del self.memory[device][buffer._replace(kind=kinds[number])]
        self._write(device, buffer, value)

    def _move(self, device: int, instruction: ins.Instruction, buffer: Buffer) -> bool:
        memory = self.memory[device]
        match instruction:
            case ins.Load():
                gradient = buffer.kind == "grad"
                if gradient and not self.resumed:
                    return False
                if buffer in self.loaded:
                    raise WrongError("loaded twice")
                self.loaded.add(buffer)
                origin = "gradient" if gradient else "caller"
                value = tensor(origin, buffer.value, buffer.microbatch, buffer.batch)
                self._write(device, buffer, value)
            case ins.Output():
                of, gradient = (buffer.value, buffer.source), buffer.kind == "grad"
                key = *of, gradient, buffer.microbatch, buffer.batch
                if key in self.model.given:
                    raise WrongError("handed over twice")
                self.model.given[key] = self._read(device, buffer)
            case ins.Send():
                pair = device, self._ends(buffer)[1]
                self.wires[pair].append((buffer, self._read(device, buffer)))
            case ins.Receive():
                wire = self.wires[self._ends(buffer)[0], device]
                if not wire:
                    return False
                name, value = wire.popleft()
                if name != buffer:
                    raise WrongError("another value arrives")
                self._write(device, buffer, value)
            case ins.Free():
                self._read(device, buffer)
                del memory[buffer]
        return True

    def _copies(self, stage: int) -> tuple[int, ...]:
        copies = self.program.copies
        return copies[stage] if 0 <= stage < len(copies) else ()

    def _copied(self, kind: BufferKind, stage: int, copy: int, batch: int) -> Buffer:
        return Buffer(kind, "", stage, stage, copy, self.step + batch)

    def _ends(self, buffer: Buffer) -> tuple[int, int]:
        """The devices that send and receive a buffer."""
        placement = self.program.placement
        if buffer.kind in ("weights", "sums"):
            ends = placement[buffer.source], buffer.microbatch
            return ends if buffer.kind == "weights" else (ends[1], ends[0])
        if buffer.kind == "norm":
            return placement[buffer.source], placement[buffer.target]
        i = buffer.microbatch
        source = self.where.get((buffer.source, i), placement[buffer.source])
        return source, self.where.get((buffer.target, i), placement[buffer.target])

    def _at_home(self, device: int, stage: int) -> None:
        if not 0 <= stage < self.program.stages or self.program.placement[stage] != device:
            raise WrongError("there is no such stage on this device")

    def _read(self, device: int, buffer: Buffer) -> int:
        if buffer not in self.memory[device]:
            raise WrongError(f"{buffer} is not there")
        return self.memory[device][buffer]

    def _write(self, device: int, buffer: Buffer, value: int) -> None:
        if buffer in self.memory[device]:
            raise WrongError(f"{buffer} is there already")
        self.memory[device][buffer] = value
