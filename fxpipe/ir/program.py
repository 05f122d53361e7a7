"""The Program: for each device the list of instructions that it runs; nothing is left to decide.

All backends, the verifier, the printer and the drawings read this one representation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from fxpipe import views
from fxpipe.formatting import plural, shown
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import Launch
from fxpipe.ir.schedule import ordered_copies
from fxpipe.ir.value import (
    COPIED,
    HOST,
    Buffer,
    BufferKind,
    Connected,
    Edge,
    Operands,
    by_value,
    gradient_groups,
    own_buffer,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


Turn = tuple[int, int]
"""A device, and the position in its list up to which it runs."""


@dataclass(frozen=True)
class Program(Connected):
    """The instruction lists of all devices for one step.

    Attributes:
        name: the schedule's name.
        microbatches: the micro-batches of a step, m.
        placement: stage → device.
        edges: the values that go from forward to forward, from the caller and to it.
        gradients: the values that go from backward to backward, from the caller and to it.
        lists: device → its instructions in order.
        passes: the lowering passes that are done; the verifier checks the rules of each.
        launches: device → how each of its instructions is launched; empty for devices without
            streams.
        replicas: how many pipelines run it side by side, each on a part of the batch, and sum their
            gradients.
        copies: stage → the further devices that compute micro-batches of it, in order; empty if
            no stage has any.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    edges: tuple[Edge, ...]
    lists: tuple[tuple[ins.Instruction, ...], ...]
    passes: tuple[str, ...] = ()
    launches: tuple[tuple[Launch, ...], ...] = ()
    replicas: int = 1
    copies: tuple[tuple[int, ...], ...] = ()
    gradients: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "copies", ordered_copies(self.copies))

    @cached_property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def devices(self) -> int:
        return len(self.lists)

    @property
    def _instructions(self) -> Iterator[ins.Instruction]:
        return chain.from_iterable(self.lists)

    @cached_property
    def depth(self) -> int:
        """How many batches back its instructions reach; 0 where every step ends with a flush."""
        return max((-x.batch for x in self._instructions), default=0)

    @cached_property
    def operands(self) -> Mapping[tuple[int, int, int], Operands]:
        """Stage, micro-batch and batch → the buffers of its computations, if it has any."""
        computes = (x for x in self._instructions if isinstance(x, ins.Compute))
        keys = {(x.stage, x.microbatch, x.batch) for x in computes if 0 <= x.stage < self.stages}
        return {key: self.operands_at(*key) for key in keys}

    def operands_of(self, x: ins.Compute) -> Operands:
        """The buffers of the micro-batch of an instruction."""
        key = x.stage, x.microbatch, x.batch
        return self.operands.get(key) or self.operands_at(*key)

    def operands_at(self, stage: int, i: int, b: int) -> Operands:
        """The buffers of a micro-batch of a stage."""

        def each(edges: Iterable[Edge]) -> tuple[Buffer, ...]:
            return tuple([edge.buffer(i, b) for edge in edges])

        return Operands(
            each(self.edges_into(stage)),
            tuple(map(each, by_value(self.edges_from(stage)))),
            own_buffer("saved", stage, i, b),
            self.kept(stage, i, b),
            tuple(map(each, gradient_groups(self.gradients_into(stage)))),
            tuple(map(each, by_value(self.gradients_from(stage)))),
        )

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """The order in which one thread can run the lists of all devices, turn by turn."""
        from fxpipe.ir.walk import turns_of

        return turns_of(self)

    @cached_property
    def window(self) -> int:
        """The receives from each other device that ranks post ahead of the next one.

        At least 1, and on streams enough for the program to finish though a send waits for its
        receive.
        """
        if not self.launches:
            return 1
        from fxpipe.verify.program import smallest_channel

        return max(1, smallest_channel(self))

    @cached_property
    def opcodes(self) -> frozenset[str]:
        """The opcodes of its instructions."""
        return frozenset(x.opcode for x in self._instructions)

    @cached_property
    def buckets(self) -> Mapping[int, int]:
        """Stage → the number of buckets of its gradients, where that is more than one."""
        counts: dict[int, int] = {}
        for x in self._instructions:
            if x.partial:
                bucket: int = getattr(x, "bucket", 0)
                counts[x.stage] = max(counts.get(x.stage, 2), bucket + 2)
        return counts

    @cached_property
    def away(self) -> Mapping[tuple[int, int], tuple[BufferKind, ins.Forward]]:
        """Stage and micro-batch of which what is kept is taken away → the kind of the buffer in
        which it is back before it is used, and the forward."""
        moves = (x for x in self._instructions if isinstance(x, ins.Move) and x.returns)
        kinds = {(x.buffer.source, x.buffer.microbatch): x.returns or "" for x in moves}
        forwards = (x for x in self._instructions if kinds and isinstance(x, ins.Forward))
        keyed = (((x.stage, x.microbatch), x) for x in forwards)
        return {key: (kinds[key], x) for key, x in keyed if key in kinds}

    def kept(self, stage: int, i: int, batch: int = 0) -> Buffer:
        """The buffer that a stage's backward uses up: saved for it, or brought back."""
        kind, forward = self.away.get((stage, i), ("saved", None))
        return own_buffer("saved" if forward and forward.again else kind, stage, i, batch)

    def copies_of(self, stage: int) -> tuple[int, ...]:
        """The further devices that compute micro-batches of a stage."""
        return self.copies[stage] if self.copies and 0 <= stage < self.stages else ()

    def held_by(self, device: int) -> tuple[int, ...]:
        """The stages that a device holds, its copies included, in order."""
        homes = enumerate(self.placement)
        return tuple(s for s, home in homes if device in (home, *self.copies_of(s)))

    def device_of(self, stage: int, microbatch: int) -> int:
        """The device that computes a micro-batch of a stage; HOST for stage HOST, the caller."""
        if stage == HOST:
            return HOST
        return self._elsewhere.get((stage, microbatch), self.placement[stage])

    @cached_property
    def _elsewhere(self) -> dict[tuple[int, int], int]:
        """Stage and micro-batch that a copy computes → the device of the copy."""
        return {
            (x.stage, x.microbatch): device
            for device, row in enumerate(self.lists if self.copies else ())
            for x in row
            if isinstance(x, ins.Forward) and device in self.copies_of(x.stage)
        }

    def ends_of(self, buffer: Buffer) -> tuple[int, int]:
        """The device that makes a buffer's value, and the one that uses it; HOST is the caller."""
        kind, _, source, target, i, _ = buffer
        if kind in COPIED:
            home = self.placement[source]
            return (home, i) if kind == "weights" else (i, home)
        if kind == "norm":
            return self.placement[source], self.placement[target]
        return self.device_of(source, i), self.device_of(target, i)

    @cached_property
    def targets(self) -> Mapping[Buffer, int]:
        """The buffer of each send → the device that it goes to."""
        sends = (x for x in self._instructions if isinstance(x, ins.Send))
        return {x.buffer: self.destination(x) for x in sends}

    def weights_of(self, x: ins.Compute) -> tuple[Buffer, ...]:
        """The buffer of weights with which a copy runs an instruction; none on other devices."""
        device = self._elsewhere.get((x.stage, x.microbatch))
        return () if device is None else (own_buffer("weights", x.stage, device, x.batch),)

    def destination(self, instruction: ins.Send) -> int:
        """The device that a send goes to."""
        return self.ends_of(instruction.buffer)[1]

    def origin(self, instruction: ins.Receive) -> int:
        """The device that a receive waits for."""
        return self.ends_of(instruction.buffer)[0]

    def __str__(self) -> str:
        """Text that ``Program.parse`` reads back to an equal value."""
        from fxpipe.text.program import print_program

        return print_program(self)

    def __repr__(self) -> str:
        count = sum(map(len, self.lists))
        return f"<Program {self.name}: {plural(self.devices, 'device')}, {count} instructions>"

    def _repr_mimebundle_(self, **kinds: object) -> dict[str, str]:
        return shown(self, sum(map(len, self.lists)))

    @staticmethod
    def parse(text: str) -> Program:
        """Read a program's text. Raises ParseError with line and column."""
        from fxpipe.text.program import parse_program

        return parse_program(text)

    def verify(self, *, channel: int | None = None) -> Program:
        """Return self, or raise VerificationError with every fault.

        Args:
            channel: how many values may be in flight from one device to another before a send
                waits for room; with 0 a send waits for its receive, with None it never waits.
        """
        from fxpipe.verify.program import verify_program

        return verify_program(self, channel)

    simulate = views.program_simulate
    draw = views.program_draw
