"""What a stage keeps goes out of the device's memory, and comes back, beside its computations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fxpipe.ir.opcodes.base import Mark, Move
from fxpipe.ir.task import KINDS
from fxpipe.ir.value import Buffer, BufferKind

if TYPE_CHECKING:
    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine


class _Offloading(Move):
    """What makes a buffer of one kind; ``from_kind`` is what it uses up."""

    __slots__ = ()
    mark = Mark("o", border="update")
    kind: ClassVar[BufferKind]
    from_kind: ClassVar[BufferKind | None] = None

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        return self.ends(program)

    def makes(self, program: Program) -> tuple[Buffer, ...]:
        return (self.buffer,)

    def ends(self, program: Program) -> tuple[Buffer, ...]:
        return () if self.from_kind is None else (self.buffer._replace(kind=self.from_kind),)

    def route(self, device: int, made: int, used: int) -> str:
        right = device == made and self.buffer.kind == self.kind
        return "" if right else f"let it make {self.kind}"


@dataclass(frozen=True, slots=True)
class Offload(_Offloading):
    """Begin to copy what a stage keeps out of the device's memory; it waits for nothing.

    The Free of what was kept waits for the copy. Roughly: buffers[b] = store.begin(buffers[saved]).
    """

    opcode = "offload"
    stands_for = KINDS["O"]
    kind = "offloaded"

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        # the caller's inputs are held until the offload has told them from what was saved
        buffer = self.buffer
        key = buffer.source, buffer.microbatch, buffer.batch
        loaded = [x for x in program.operands_at(*key).inputs if x.kind == "in"]
        return tuple(dict.fromkeys((*program.stored(*key), *loaded)))

    def run(self, machine: Machine) -> None:
        from fxpipe.runtime.offload import begin

        begin(machine, self.buffer)


@dataclass(frozen=True, slots=True)
class Prefetch(_Offloading):
    """Begin to bring back what was offloaded.

    Roughly: buffers[b] = buffers.pop(offloaded).begin().
    """

    opcode = "prefetch"
    stands_for = KINDS["P"]
    kind = "fetching"
    from_kind = "offloaded"
    mark = Mark("f", border="update")

    @property
    def stored(self) -> Buffer:
        """The buffer that is brought back."""
        return self.buffer._replace(kind="offloaded")

    def run(self, machine: Machine) -> None:
        from fxpipe.runtime.offload import prefetch

        prefetch(machine, self.buffer)


@dataclass(frozen=True, slots=True)
class Await(_Offloading):
    """Wait until a prefetch is done. Roughly: buffers[b] = buffers.pop(fetching).wait()."""

    opcode = "await"
    kind = "fetched"
    from_kind = "fetching"
    mark = Mark("a", border="update")

    def run(self, machine: Machine) -> None:
        values, away = machine.store.values.pop(self.buffer._replace(kind="fetching"))
        away.wait()
        machine.store.values[self.buffer] = values
