"""What an instruction tells of itself: its text, buffers, rules, and how it runs."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fxpipe.ir.effects import NO_SPACES, WEIGHTS, DeviceMemory, Spaces
from fxpipe.ir.launch import COMPUTE
from fxpipe.ir.task import KINDS, Key, TaskKind
from fxpipe.ir.value import Buffer, BufferKind, own_buffer

if TYPE_CHECKING:
    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine

Wrong = tuple[str, str]
"""What is wrong, and what to do about it."""


class Instruction:
    """Base of all instructions. A class of your own is made known by ``register("instruction",
    opcode, cls)`` of ``fxpipe.extend``; it derives from ``Move``, ``Compute`` or ``OncePerStep``.

    Attributes:
        opcode: its word in texts of programs.
        form: the template of its operands in a text, see ``fxpipe.text.form``, and an example.
        flags: word behind the operands → the field that it sets.
        task: the letter of the task that it runs; None for an instruction that computes nothing.
        stands_for: the kind of task that stands for it where tasks are verified, if it runs none.
        counted: its fields that count batches or versions from the present step.
        stream: the stream that runs it on devices with streams, unless it brings a value there. On
            another than the one that computes it goes on beside the instructions behind it.
        takes: whether it takes memory of its device.
        provides: what its stage has from then on, and had not before.
        removes: what its stage has no more from then on, and had before.
        adds: whether it adds to the sums of its stage's gradients, which are in memory from then
            on.
        before_barrier: whether it computes or sums gradients, and so comes before a barrier.
        after_barrier: whether it changes weights, and so comes behind a barrier.
        partial: whether it runs only a part of a task, which the instruction behind it completes.
        sums: whether it adds to its stage's gradients: what needs "gradients" comes behind it.
        spends: for one that takes its stage's gradients away: what becomes of them, and what to do
            about an instruction behind it that reads them.
        restores: the letter of the task that took the gradients which are there again behind it.
        completes: whether the next version of its stage's weights is there once it has run.
        stage: its stage; moves and meetings have none.
    """

    __slots__ = ()
    opcode: ClassVar[str]
    form: ClassVar[tuple[str, str]] = "", ""
    flags: ClassVar[Mapping[str, str]] = {}
    task: ClassVar[str | None] = None
    stands_for: ClassVar[TaskKind | None] = None
    counted: ClassVar[tuple[str, ...]] = ()
    stream: ClassVar[str] = COMPUTE
    takes: ClassVar[bool] = True
    provides: ClassVar[tuple[str, ...]] = ()
    removes: ClassVar[tuple[str, ...]] = ()
    adds: ClassVar[bool] = False
    before_barrier: ClassVar[bool] = False
    after_barrier: ClassVar[bool] = False
    partial: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    spends: ClassVar[Wrong | None] = None
    restores: ClassVar[str] = ""
    completes: ClassVar[bool] = False
    stage: int

    @property
    def letter(self) -> str | None:
        """The letter of its task; None for an instruction that computes nothing."""
        return self.task

    @property
    def batch(self) -> int:
        """The batch that it belongs to: 0 for this step's, −1 for the one before."""
        return 0

    def uses(self, program: Program) -> tuple[Buffer, ...]:
        """The buffers that it needs on its device."""
        return ()

    def makes(self, program: Program) -> tuple[Buffer, ...]:
        """The buffers that it makes on its device."""
        return ()

    def ends(self, program: Program) -> tuple[Buffer, ...]:
        """The buffers whose life on the device ends with it."""
        return ()

    @property
    def needs(self) -> Sequence[str]:
        """The letters of the tasks of its stage behind which it comes on its device: of its own
        micro-batch, or of all if it has none. "gradients" stands for all that ``sums``, an opcode
        for an instruction that is no task. Tasks that make its buffers can be left out."""
        return ()

    @property
    def requires(self) -> Sequence[str]:
        """What its stage must have when it runs, besides buffers, such as its whole weights."""
        return ()

    def spaces(self, memory: DeviceMemory) -> Spaces:
        """The memory that it takes and frees besides that of its buffers and its graph."""
        return NO_SPACES

    def begins(self, program: Program) -> Any:
        """What it begins to exchange with the other replicas, which goes on beside what follows:
        an ``Exchange`` of ``fxpipe/extensions/exchange.py``, or None."""
        return None

    def awaits(self, program: Program) -> Any:
        """What is exchanged with the other replicas that it waits for; of several parts the last,
        as they go one after another over the same link."""
        return None

    @property
    def reads_gradients(self) -> bool:
        """Whether it may run only where its stage's gradients are not taken away."""
        return False

    @classmethod
    def of_every_stage(cls, program: Program, there: Container[str]) -> bool:
        """Whether each stage must have its task in a program with tasks of these letters."""
        return False

    def later(self, steps: int) -> Self:
        """The instruction with its batch and version counted from ``steps`` steps earlier."""
        moved = {name: steps + getattr(self, name) for name in self.counted}
        return replace(self, **moved) if moved else self  # type: ignore[type-var]

    def wrong(self, program: Program, device: int) -> Wrong | None:
        """What is wrong with it by itself on a device, whatever comes before and after it."""
        return None

    def misfits(self, tasks: Container[Key], trains: bool) -> Iterator[Wrong]:
        """What is wrong with it, given which tasks its program has, and whether it trains."""
        yield from ()

    def then(self, x: Instruction) -> str:
        """What to do if another may not be the next one of its stage; empty if it may."""
        return ""

    def behind(self, before: Instruction | None) -> Wrong | None:
        """What is wrong with it as the next one of its stage behind another, if any."""
        return None

    def run(self, machine: Machine) -> None:
        """Run it on a device."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Move(Instruction):
    """Base of the instructions that move, make or drop one buffer.

    Attributes:
        kinds: kinds of buffers that are its own, for what a stage keeps for itself.
        returns: for one that takes away what a stage keeps of a micro-batch, the kind of the buffer
            in which that is back before it is used.
    """

    kinds: ClassVar[tuple[BufferKind, ...]] = ()
    returns: ClassVar[BufferKind | None] = None
    buffer: Buffer

    @property
    def batch(self) -> int:
        return self.buffer.batch

    def later(self, steps: int) -> Self:
        return type(self)(self.buffer._replace(batch=steps + self.buffer.batch))

    def route(self, device: int, made: int, used: int) -> str:
        """What to do if this is no instruction for a value made on one device and used on another;
        HOST is the caller. Empty if it is one."""
        return ""


@dataclass(frozen=True, slots=True)
class Compute(Instruction):
    """Base of the instructions that run a graph of a stage for one micro-batch.

    Attributes:
        version: the version of the weights. In step t, 0 is the version that t updates have made,
            −1 the one before it; a version older than the first stands for the first.
        batch: 0 for this step's batch, −1 for the one before.
    """

    counted = "version", "batch"
    before_barrier = True
    form = "s{stage}[{microbatch}{batch:batch}] v{version:signed}", "s0[0] v0"
    stage: int
    microbatch: int
    version: int = 0
    batch: int = 0

    @property
    def requires(self) -> Sequence[str]:
        return (WEIGHTS,)

    def own(self, kind: BufferKind) -> Buffer:
        """A buffer that the stage keeps for itself."""
        return own_buffer(kind, self.stage, self.microbatch, self.batch)


@dataclass(frozen=True, slots=True)
class OncePerStep(Instruction):
    """Base of the instructions that run for a stage once a step.

    Attributes:
        batch: 0 for this step's batch, −1 for the one before.
    """

    counted = ("batch",)
    form = "s{stage}{batch:batch}", "s0"
    stage: int
    batch: int = 0

    @property
    def needs(self) -> Sequence[str]:
        kind = self.stands_for or KINDS.get(self.letter or "")
        return kind.follows if kind else ""
