"""What a stage keeps goes out of the device's memory, and comes back, beside its computations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fxpipe.extensions.offload import storing
from fxpipe.ir.opcodes.base import Move
from fxpipe.ir.task import KINDS
from fxpipe.ir.value import Buffer, BufferKind, own_buffer

if TYPE_CHECKING:
    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine


class _Offloading(Move):
    """What makes a buffer of a kind of its own; ``from_kind`` is what it uses up."""

    __slots__ = ()
    from_kind: ClassVar[BufferKind | None] = None

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        return self.ends(program)

    def makes(self, program: Program) -> tuple[Buffer, ...]:
        return (self.buffer,)

    def ends(self, program: Program) -> tuple[Buffer, ...]:
        return () if self.from_kind is None else (self.buffer._replace(kind=self.from_kind),)

    def route(self, device: int, made: int, used: int) -> str:
        right = device == made and self.buffer.kind in self.kinds
        return "" if right else f"let it make {self.kinds[0]}"


@dataclass(frozen=True, slots=True)
class Offload(_Offloading):
    """Begin to copy what a stage keeps out of the device's memory; it waits for nothing.

    The Free of what was kept waits for the copy. Roughly: buffers[b] = store.begin(buffers[saved]).
    """

    opcode = "offload"
    stands_for = KINDS["O"]
    stream = "offload"
    takes = False
    kinds = ("offloaded",)
    returns = "fetched"

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        # the caller's inputs are held until the offload has told them from what was saved
        buffer = self.buffer
        key = buffer.source, buffer.microbatch, buffer.batch
        loaded = [x for x in program.operands_at(*key).inputs if x.kind == "in"]
        return tuple(dict.fromkeys((*stored(program, *key), *loaded)))

    def run(self, machine: Machine) -> None:
        _, _, stage, _, i, batch = self.buffer
        _, forward = machine.program.away[stage, i]
        buffers = stored(machine.program, stage, i, batch)
        away = storing.store(machine, forward, batch, buffers)
        machine.store.values[self.buffer] = away
        machine.store.busy[buffers[0]] = away.memory.wait


@dataclass(frozen=True, slots=True)
class Prefetch(_Offloading):
    """Begin to bring back what was offloaded.

    Roughly: buffers[b] = buffers.pop(offloaded).begin().
    """

    opcode = "prefetch"
    stands_for = KINDS["P"]
    stream = "prefetch"
    kinds = ("fetching",)
    from_kind = "offloaded"

    def run(self, machine: Machine) -> None:
        _, _, stage, _, i, batch = self.buffer
        values, busy = machine.store.values, machine.store.busy
        values[self.buffer] = storing.fetch(values.pop(own_buffer("offloaded", stage, i, batch)))
        busy.pop(stored(machine.program, stage, i, batch)[0], None)


@dataclass(frozen=True, slots=True)
class Await(_Offloading):
    """Wait until a prefetch is done. Roughly: buffers[b] = buffers.pop(fetching).wait()."""

    opcode = "await"
    kinds = ("fetched",)
    from_kind = "fetching"

    def run(self, machine: Machine) -> None:
        values, memory = machine.store.values.pop(self.buffer._replace(kind="fetching"))
        memory.wait()
        machine.store.values[self.buffer] = values


def stored(program: Program, stage: int, i: int, batch: int = 0) -> tuple[Buffer, ...]:
    """The buffers that an offload stores: those saved, or all that a recompute reads."""
    away = program.away.get((stage, i))
    if away and away[1].again:
        return (own_buffer("state", stage, i, batch), *program.operands_at(stage, i, batch).inputs)
    return (own_buffer("saved", stage, i, batch),)
