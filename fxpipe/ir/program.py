"""The Program: per device the list of instructions that runs. Nothing is left to decide.

Every backend, the verifier, the printer and the drawings consume this one representation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from fxpipe.formatting import plural, shown
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import Launch
from fxpipe.ir.schedule import ordered_copies
from fxpipe.ir.value import COPIED, HOST, Buffer, Edge, Operands, norm_buffer, own_buffer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fxpipe.draw.picture import Picture
    from fxpipe.simulator import Simulation, Sizes
    from fxpipe.simulator.costs import Costs, Links

Turn = tuple[int, int]
"""A device, and the position in its list up to which it goes on."""


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
        launches: device → how each of its instructions is launched; empty for devices that do one
            instruction after another.
        replicas: how many pipelines run it side by side, each on a part of the batch; they sum
            their gradients.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "copies", ordered_copies(self.copies))

    @cached_property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def devices(self) -> int:
        return len(self.lists)

    @cached_property
    def depth(self) -> int:
        """How many batches back its instructions reach: 0 where every step ends with a flush."""
        return max((-ins.batch_of(x) for list_ in self.lists for x in list_), default=0)

    @cached_property
    def edges_into(self) -> tuple[tuple[Edge, ...], ...]:
        """Stage → the edges that its forward reads, in the order of ``edges``."""
        return self._grouped([edge.target for edge in self.edges])

    @cached_property
    def edges_from(self) -> tuple[tuple[Edge, ...], ...]:
        """Stage → the edges that its forward writes, in the order of ``edges``."""
        return self._grouped([edge.source for edge in self.edges])

    @cached_property
    def operands(self) -> Mapping[tuple[int, int, int], Operands]:
        """Stage, micro-batch and batch → the buffers of what its lists compute of it."""
        every = (x for own in self.lists for x in own if isinstance(x, ins.Compute))
        keys = {(x.stage, x.microbatch, x.batch) for x in every if 0 <= x.stage < self.stages}
        return {key: self._operands(*key) for key in keys}

    def _operands_of(self, x: ins.Compute) -> Operands:
        key = x.stage, x.microbatch, x.batch
        return self.operands.get(key) or self._operands(*key)

    def _operands(self, stage: int, i: int, b: int) -> Operands:
        kept, into, away = self.kept(stage, i, b), self.edges_into[stage], self.edges_from[stage]
        return Operands.of(kept, into, away)

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """Whose turn it is, one after another, where one thread runs the lists of all devices."""
        from fxpipe.ir.walk import turns_of

        return turns_of(self)

    @cached_property
    def window(self) -> int:
        """How many receives from each other device are posted ahead on ranks with streams, beyond
        the one that is waited for: at least one, and as many as the program needs to come to its
        end where a send waits until its receive is posted."""
        from fxpipe.verify.program import smallest_channel

        return max(1, smallest_channel(self))

    @cached_property
    def followed(self) -> frozenset[tuple[object, ...]]:
        """The values, without their batches, right after which their device sends another one to
        the same device, and computes nothing in between: both may travel together."""
        found = set[tuple[object, ...]]()
        for own in self.lists:
            latest: dict[int, tuple[object, ...]] = {}
            for x in own:
                if isinstance(x, ins.Sending):
                    target = self.destination(x)
                    if target in latest:
                        found.add(latest[target])
                    latest[target] = x.buffer[:5]
                elif not isinstance(x, ins.Free | ins.Output):
                    latest.clear()
        return frozenset(found)

    @cached_property
    def sharded(self) -> frozenset[int]:
        """The stages of whose weights each replica updates a part."""
        parts = (x.stage for own in self.lists for x in own if isinstance(x, ins.TakePart))
        return frozenset(parts)

    @cached_property
    def clips(self) -> bool:
        """Whether norms of gradients are taken, to clip them."""
        return any(isinstance(x, ins.Norm) for own in self.lists for x in own)

    @cached_property
    def buckets(self) -> Mapping[int, int]:
        """Stage → into how many buckets its gradients go, where it is more than one."""
        found: dict[int, int] = {}
        for x in (x for own in self.lists for x in own if isinstance(x, ins.PartialBackward)):
            found[x.stage] = max(found.get(x.stage, 2), x.bucket + 2)
        return found

    @cached_property
    def offloads(self) -> Mapping[tuple[int, int], ins.Forward]:
        """Stage and micro-batch of what is offloaded → its forward."""
        every = [x for own in self.lists for x in own]
        stored = [x.buffer for x in every if isinstance(x, ins.Offload)]
        keys = {(buffer.source, buffer.microbatch) for buffer in stored}
        forwards = (x for x in every if keys and isinstance(x, ins.Forward))
        return {key: x for x in forwards if (key := (x.stage, x.microbatch)) in keys}

    def kept(self, stage: int, i: int, batch: int = 0) -> Buffer:
        """What a stage's backward uses up: what was saved for it, or that fetched again."""
        forward = self.offloads.get((stage, i))
        return own_buffer("fetched" if forward and not forward.again else "saved", stage, i, batch)

    def stored(self, stage: int, i: int, batch: int = 0) -> tuple[Buffer, ...]:
        """What an offload takes: what a stage's forward saved, or all that its recompute reads."""
        forward = self.offloads.get((stage, i))
        if forward and forward.again:
            return (own_buffer("state", stage, i, batch), *self._operands(stage, i, batch).inputs)
        return (own_buffer("saved", stage, i, batch),)

    def only(self, device: int) -> Program:
        """The same with the instructions of one device alone, and the depth and the window of all:
        what a process needs that runs this device."""
        made = replace(
            self,
            lists=tuple(own if d == device else () for d, own in enumerate(self.lists)),
            launches=tuple(own if d == device else () for d, own in enumerate(self.launches)),
        )
        vars(made)["depth"] = self.depth
        vars(made)["_elsewhere"] = self._elsewhere
        if self.launches:
            vars(made)["window"] = self.window
        return made

    def _grouped(self, ends: list[int]) -> tuple[tuple[Edge, ...], ...]:
        groups: list[list[Edge]] = [[] for _ in range(self.stages)]
        for edge, stage in zip(self.edges, ends, strict=True):
            if stage != HOST:
                groups[stage].append(edge)
        return tuple(map(tuple, groups))

    def copies_of(self, stage: int) -> tuple[int, ...]:
        """The further devices that compute micro-batches of a stage."""
        return self.copies[stage] if self.copies and 0 <= stage < self.stages else ()

    def held_by(self, device: int) -> tuple[int, ...]:
        """The stages on a device, in order, and those of which it has a copy."""
        every = enumerate(self.placement)
        return tuple(s for s, home in every if device in (home, *self.copies_of(s)))

    def device_of(self, stage: int, microbatch: int) -> int:
        """The device that computes a micro-batch of a stage; HOST for the caller."""
        if stage == HOST:
            return HOST
        return self._elsewhere.get((stage, microbatch), self.placement[stage])

    @cached_property
    def _elsewhere(self) -> dict[tuple[int, int], int]:
        """Stage and micro-batch → the device, for those that a copy computes."""
        return {
            (x.stage, x.microbatch): device
            for device, own in enumerate(self.lists if self.copies else ())
            for x in own
            if isinstance(x, ins.Forward) and device in self.copies_of(x.stage)
        }

    def ends_of(self, buffer: Buffer) -> tuple[int, int]:
        """The device that makes what a buffer holds, and the one that uses it; HOST for the
        caller."""
        kind, _, source, target, i, _ = buffer
        if kind in COPIED:
            home = self.placement[source]
            return (home, i) if kind == "weights" else (i, home)
        if kind == "norm":
            return self.placement[source], self.placement[target]
        return self.device_of(source, i), self.device_of(target, i)

    def _weights(self, stage: int, i: int, batch: int) -> tuple[Buffer, ...]:
        """The weights that a copy of a stage computes a micro-batch with; others have theirs."""
        device = self._elsewhere.get((stage, i))
        return () if device is None else (own_buffer("weights", stage, device, batch),)

    def reads(self, instruction: ins.Instruction) -> tuple[Buffer, ...]:
        """The buffers that an instruction needs on its device."""
        match instruction:  # the frequent ones first
            case ins.Send(buffer) | ins.Output(buffer) | ins.Stash(buffer):
                return (buffer,)
            case ins.Offload(Buffer(source=stage, microbatch=i, batch=b)):
                # what the caller gives is held until it is told from the rest
                inputs = self._operands(stage, i, b).inputs
                given = [buffer for buffer in inputs if buffer.kind == "in"]
                return tuple(dict.fromkeys((*self.stored(stage, i, b), *given)))
            case ins.Move():
                return self.ends(instruction) if isinstance(instruction, ins.Offloading) else ()
            case ins.Compute(stage, i, batch=b):
                weights, own = self._weights(stage, i, b), self._operands_of(instruction)
                match instruction:
                    case ins.Forward():
                        return (*weights, *own.inputs)
                    case ins.Recompute() if (stage, i) in self.offloads:
                        return (*weights, own_buffer("fetched", stage, i, b))
                    case ins.Recompute():
                        return (*weights, own_buffer("state", stage, i, b), *own.inputs)
                    case ins.WeightGrad() | ins.PartialBackward(kind="W"):
                        return (*weights, own_buffer("deferred", stage, i, b))
                return (*weights, own.kept, *chain(*own.gradients))
            case ins.Add(stage, b):
                return tuple([own_buffer("sums", stage, copy, b) for copy in self.copies_of(stage)])
            case ins.Clip(stage, b):
                return tuple([norm_buffer(other, stage, b) for other in range(self.stages)])
        return ()

    def writes(self, instruction: ins.Instruction) -> tuple[Buffer, ...]:
        """The buffers that an instruction makes on its device."""
        match instruction:
            case ins.Receive(buffer) | ins.Load(buffer) | ins.Pop(buffer):
                return (buffer,)
            case ins.Offload(buffer) | ins.Prefetch(buffer) | ins.Await(buffer):
                return (buffer,)
            case ins.Move():
                return ()
            case ins.Forward(stage, i, keeps=keeps, again=again, batch=b):
                own = self._operands_of(instruction)
                state = (own_buffer("state", stage, i, b),) if again else ()
                return (*chain(*own.outputs), *([own.saved] if keeps else ()), *state)
            case ins.Recompute(stage, i, batch=b):
                return (own_buffer("saved", stage, i, b),)
            case ins.Backward():
                return self._operands_of(instruction).returned
            case ins.InputGrad(stage, i, batch=b):
                returned = self._operands_of(instruction).returned
                return (own_buffer("deferred", stage, i, b), *returned)
            case ins.Norm(stage, b):
                return tuple([norm_buffer(stage, other, b) for other in range(self.stages)])
            case ins.Share(stage, b):
                copies = self.copies_of(stage)
                return tuple([own_buffer("weights", stage, copy, b) for copy in copies])
            case ins.Give(stage, copy, b):
                return (own_buffer("sums", stage, copy, b),)
        return ()

    def ends(self, instruction: ins.Instruction) -> tuple[Buffer, ...]:
        """The buffers whose life on the device ends with an instruction."""
        match instruction:
            case ins.Free(buffer):
                return (buffer,)
            case ins.Prefetch():
                return (instruction.stored,)
            case ins.Await(buffer):
                return (buffer._replace(kind="fetching"),)
            case ins.Move():
                return ()
            case ins.Backward(stage, i, batch=b) | ins.InputGrad(stage, i, batch=b):
                return (self.kept(stage, i, b),)
            case ins.WeightGrad(stage, i, batch=b):
                return (own_buffer("deferred", stage, i, b),)
            case ins.Recompute(stage, i, batch=b):
                away = (stage, i) in self.offloads
                return (own_buffer("fetched" if away else "state", stage, i, b),)
        return ()

    def destination(self, instruction: ins.Send | ins.Stash) -> int:
        """The device that a send or a stash goes to."""
        return self.ends_of(instruction.buffer)[1]

    def origin(self, instruction: ins.Receive | ins.Pop) -> int:
        """The device that a receive or a pop waits for."""
        return self.ends_of(instruction.buffer)[0]

    def __str__(self) -> str:
        """Text that ``Program.parse`` reads back to an equal value."""
        from fxpipe.text.program import print_program

        return print_program(self)

    def __repr__(self) -> str:
        count = sum(map(len, self.lists))
        return f"<Program {self.name}: {plural(self.devices, 'device')}, {count} instructions>"

    def _repr_mimebundle_(self, **kinds: object) -> dict[str, str]:
        """Its picture, for notebooks."""
        return shown(self, sum(map(len, self.lists)))

    @staticmethod
    def parse(text: str) -> Program:
        """Read a program's text. Raises ParseError with line and column."""
        from fxpipe.text.program import parse_program

        return parse_program(text)

    def verify(self, *, channel: int | None = None) -> Program:
        """Return self, or raise VerificationError with every fault.

        Args:
            channel: how many values may be on their way from one device to another, before a
                send waits for room; 0 where it waits for its receive, None for any number.
        """
        from fxpipe.verify.program import verify_program

        return verify_program(self, channel)

    def simulate(
        self,
        costs: Costs | None = None,
        *,
        links: Links | None = None,
        overlap: bool = True,
        sizes: Sizes | None = None,
        steps: int | None = None,
    ) -> Simulation:
        """Run it on paper. See ``fxpipe.simulator.simulate``."""
        from fxpipe.simulator import simulate

        return simulate(self, costs, links=links, overlap=overlap, sizes=sizes, steps=steps)

    def draw(self) -> Picture:
        """The program as a picture: devices as rows, time to the right, transfers as arrows."""
        from fxpipe.draw.program import draw_program

        return draw_program(self)
