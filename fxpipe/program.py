"""The Program: per device the list of instructions that runs. Nothing is left to decide.

Every backend, the verifier, the printer and the drawings consume this one representation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from fxpipe.edge import HOST, Edge, gradient_groups, stage_name

if TYPE_CHECKING:
    from fxpipe.draw.picture import Picture

BufferKind = Literal["in", "act", "skip", "out", "grad", "saved"]


class Buffer(NamedTuple):
    """A place for one value of one micro-batch on one device.

    ``in``, ``act``, ``skip`` and ``out`` hold a value on its way along an edge, ``grad`` the
    gradient that comes back along it (so its source is the edge's target), ``saved`` what a
    stage keeps between forward and backward.
    """

    kind: BufferKind
    value: str
    source: int
    target: int
    microbatch: int

    def __str__(self) -> str:
        if self.kind == "saved":
            return f"saved:{self.source}[{self.microbatch}]"
        ends = f"{stage_name(self.source)}->{stage_name(self.target)}"
        return f"{self.kind}:{self.value}:{ends}[{self.microbatch}]"


def saved(stage: int, microbatch: int) -> Buffer:
    """What a stage keeps of a micro-batch for its backward."""
    return Buffer("saved", "", stage, stage, microbatch)


def forward_buffer(edge: Edge, microbatch: int) -> Buffer:
    """The buffer of a value along an edge."""
    return Buffer(edge.kind, edge.value, edge.source, edge.target, microbatch)


def gradient_buffer(edge: Edge, microbatch: int) -> Buffer:
    """The buffer of the gradient that comes back along an edge."""
    return Buffer("grad", edge.value, edge.target, edge.source, microbatch)


@dataclass(frozen=True, slots=True)
class Load:
    """Take a value of this micro-batch from the caller. Roughly: buffers[b] = host.give(b)."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Output:
    """Hand a value to the caller. Roughly: host.take(b, buffers[b])."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the next stage's device, or a gradient back. Roughly: peer.put(b, buffers[b])."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for what a peer sends. Roughly: buffers[b] = self.get(b)."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Stash:
    """Send a value over the stages between, straight to its consumer."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Pop:
    """Wait for a value that was stashed for this stage."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a stage's forward graph. Roughly: outputs, saved = forward(weights[version], inputs).

    Attributes:
        keeps: whether it keeps what its backward needs.
    """

    stage: int
    microbatch: int
    version: int = 0
    keeps: bool = True


@dataclass(frozen=True, slots=True)
class Backward:
    """Run a stage's backward graph, which uses up ``saved``, and add to its gradients.

    Roughly: input_gradients, g = backward(saved, output_gradients); gradients[stage] += g.
    """

    stage: int
    microbatch: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    """Drop a buffer. Roughly: del buffers[b]."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Barrier:
    """Wait until every device is here, so that no weight changes before all gradients exist."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Give control back to the caller until it resumes the program with more to load."""


@dataclass(frozen=True, slots=True)
class Update:
    """Step a stage's optimizer. Roughly: weights[writes] = optimizer(weights[reads], gradients)."""

    stage: int
    reads: int = 0
    writes: int = 1


Instruction = (
    Load
    | Output
    | Send
    | Receive
    | Stash
    | Pop
    | Forward
    | Backward
    | Free
    | Barrier
    | Pause
    | Update
)

OPCODES: dict[str, type[Instruction]] = {
    "load": Load,
    "output": Output,
    "send": Send,
    "recv": Receive,
    "stash": Stash,
    "pop": Pop,
    "forward": Forward,
    "backward": Backward,
    "free": Free,
    "barrier": Barrier,
    "pause": Pause,
    "update": Update,
}
"""Every opcode by its word in the text."""


@dataclass(frozen=True)
class Program:
    """The instruction lists of all devices for one step.

    Attributes:
        name: the schedule's name.
        microbatches: micro-batches a step, m.
        placement: stage → device.
        edges: what goes between stages, and from and to the caller.
        lists: device → its instructions in order.
        passes: the lowering passes that are done; the verifier holds the rules of each.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    edges: tuple[Edge, ...]
    lists: tuple[tuple[Instruction, ...], ...]
    passes: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def devices(self) -> int:
        return len(self.lists)

    @cached_property
    def edges_into(self) -> tuple[tuple[Edge, ...], ...]:
        """Stage → the edges that its forward reads, in the order of ``edges``."""
        return self._grouped([edge.target for edge in self.edges])

    @cached_property
    def edges_from(self) -> tuple[tuple[Edge, ...], ...]:
        """Stage → the edges that its forward writes, in the order of ``edges``."""
        return self._grouped([edge.source for edge in self.edges])

    def _grouped(self, ends: list[int]) -> tuple[tuple[Edge, ...], ...]:
        groups: list[list[Edge]] = [[] for _ in range(self.stages)]
        for edge, stage in zip(self.edges, ends, strict=True):
            if stage != HOST:
                groups[stage].append(edge)
        return tuple(map(tuple, groups))

    @cached_property
    def gradients_of(self) -> tuple[tuple[tuple[Edge, ...], ...], ...]:
        """Stage → for each value that gets a gradient, its edges in the order of the sum."""
        return tuple(gradient_groups(edges) for edges in self.edges_from)

    def reads(self, instruction: Instruction) -> tuple[Buffer, ...]:
        """The buffers that an instruction needs on its device."""
        match instruction:
            case Forward(stage, i):
                return tuple([forward_buffer(edge, i) for edge in self.edges_into[stage]])
            case Backward(stage, i):
                returned = [gradient_buffer(e, i) for e in self.edges_from[stage] if e.gradient]
                return (saved(stage, i), *returned)
            case Output(buffer) | Send(buffer) | Stash(buffer):
                return (buffer,)
        return ()

    def writes(self, instruction: Instruction) -> tuple[Buffer, ...]:
        """The buffers that an instruction makes on its device."""
        match instruction:
            case Forward(stage, i, keeps=keeps):
                made = [forward_buffer(edge, i) for edge in self.edges_from[stage]]
                return (*made, saved(stage, i)) if keeps else tuple(made)
            case Backward(stage, i):
                return tuple([gradient_buffer(e, i) for e in self.edges_into[stage] if e.gradient])
            case Load(buffer) | Receive(buffer) | Pop(buffer):
                return (buffer,)
        return ()

    def ends(self, instruction: Instruction) -> tuple[Buffer, ...]:
        """The buffers whose life on the device ends with an instruction."""
        match instruction:
            case Free(buffer):
                return (buffer,)
            case Backward(stage, i):
                return (saved(stage, i),)
        return ()

    def destination(self, instruction: Send | Stash) -> int:
        """The device that a send or a stash goes to."""
        return self.placement[instruction.buffer.target]

    def origin(self, instruction: Receive | Pop) -> int:
        """The device that a receive or a pop waits for."""
        return self.placement[instruction.buffer.source]

    def __str__(self) -> str:
        """Text that ``Program.parse`` reads back to an equal value."""
        from fxpipe.text.program import print_program

        return print_program(self)

    @staticmethod
    def parse(text: str) -> Program:
        """Read a program's text. Raises ParseError with line and column."""
        from fxpipe.text.program import parse_program

        return parse_program(text)

    def verify(self) -> Program:
        """Return self, or raise VerificationError with every fault."""
        from fxpipe.verify.program import verify_program

        return verify_program(self)

    def draw(self) -> Picture:
        """The program as a picture: devices as rows, time to the right, transfers as arrows."""
        from fxpipe.draw.program import draw_program

        return draw_program(self)


__all__ = [
    "HOST",
    "OPCODES",
    "Backward",
    "Barrier",
    "Buffer",
    "Forward",
    "Free",
    "Instruction",
    "Load",
    "Output",
    "Pause",
    "Pop",
    "Program",
    "Receive",
    "Send",
    "Stash",
    "Update",
    "forward_buffer",
    "gradient_buffer",
    "saved",
]
