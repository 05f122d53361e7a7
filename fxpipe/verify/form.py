"""Whether a program's edges and each of its instructions are well-formed by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxpipe.errors import Fault
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.task import KINDS
from fxpipe.ir.value import (
    HOST,
    KEPT,
    Buffer,
    Edge,
    forward_buffer,
    gradient_buffer,
    norm_buffer,
    stage_name,
)
from fxpipe.ir.walk import Place
from fxpipe.text.edge import is_name
from fxpipe.text.instruction import print_instruction
from fxpipe.verify.spans import counts_faults


def frame_faults(program: Program) -> Iterator[Fault]:
    """What is wrong with the counts, the placement and the edges.

    With any of these the instructions cannot be judged.
    """
    if program.microbatches < 1:
        yield Fault(f"it has {program.microbatches} micro-batches", "give it at least 1")
    if not program.placement:
        yield Fault("it has no stages", "place at least one")
    for stage, device in enumerate(program.placement):
        if not 0 <= device < program.devices:
            yield Fault(
                f"stage {stage} is placed on device {device}",
                f"place it on one of the {program.devices} devices, numbered from 0",
            )
    if program.launches and list(map(len, program.launches)) != list(map(len, program.lists)):
        yield Fault(
            f"its devices have {_counts(program.launches)} launches for "
            f"{_counts(program.lists)} instructions",
            "give each instruction its launch, or none of them",
        )
    elif "streams" in program.passes and not program.launches and any(program.lists):
        yield Fault("its instructions have streams and no launches", "run the pass streams again")
    held = sum(map(len, program.lists))
    lists = program.lists
    older = (abs(x.version - x.batch) for own in lists for x in own if isinstance(x, ins.Compute))
    reach = max(program.depth, max(older, default=0))
    tasks = program.microbatches if {"lower", "communicate"} & {*program.passes} else 0
    yield from counts_faults(program.stages, tasks, held, reach)
    sources: dict[str, int] = {}
    known: set[tuple[str, int, int]] = set()
    for edge in program.edges:
        yield from _edge_faults(edge, program.stages)
        if sources.setdefault(edge.value, edge.source) != edge.source:
            yield Fault(
                f"{edge.value} is made by stages {stage_name(sources[edge.value])} and "
                f"{stage_name(edge.source)}",
                "give each value a name of its own",
                subject=f"edge {edge}",
            )
        if (edge.value, edge.source, edge.target) in known:
            yield Fault("there are two such edges", "keep one", subject=f"edge {edge}")
        known.add((edge.value, edge.source, edge.target))


def _counts(lists: Sequence[Sequence[object]]) -> str:
    return ", ".join(str(len(own)) for own in lists) or "no"


def _edge_faults(edge: Edge, stages: int) -> Iterator[Fault]:
    subject = f"edge {edge}"
    if not is_name(edge.value):
        yield Fault(
            f"{edge.value!r} is no name of a value", "give it an identifier", subject=subject
        )
    for end in (edge.source, edge.target):
        if end != HOST and not 0 <= end < stages:
            yield Fault(
                f"there is no stage {end}", f"name one of the {stages} stages", subject=subject
            )
    if edge.source == edge.target == HOST:
        yield Fault("it goes from the caller to the caller", "remove it", subject=subject)
    elif HOST not in (edge.source, edge.target) and edge.source >= edge.target:
        yield Fault("an edge runs forward", "let a later stage use the value", subject=subject)


class Form:
    """The check of single instructions.

    Buffers differ in little but their micro-batch, so the verdict on the rest is kept.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._routes: dict[tuple[object, ...], tuple[int, int]] = {}
        for edge in program.edges:
            made, used = self._home(edge.source), self._home(edge.target)
            self._routes[forward_buffer(edge, 0)[:4]] = made, used
            if edge.gradient:
                self._routes[gradient_buffer(edge, 0)[:4]] = used, made
        for stage, home in enumerate(program.placement):
            for other, there in enumerate(program.placement):
                self._routes[norm_buffer(stage, other)[:4]] = home, there
            for kind in KEPT:
                self._routes[kind, "", stage, stage] = home, home
        self._verdicts: dict[tuple[object, ...], tuple[str, str] | None] = {}

    def faults(self, malformed: set[Place]) -> Iterator[Fault]:
        """The fault of each malformed instruction, whose place is added to ``malformed``."""
        for device, list_ in enumerate(self.program.lists):
            for position, instruction in enumerate(list_):
                wrong = self._judge(device, instruction)
                if wrong is not None:
                    malformed.add(Place(device, position))
                    yield Fault(*wrong, device, position, print_instruction(instruction))

    def _judge(self, device: int, instruction: ins.Instruction) -> tuple[str, str] | None:
        """What is wrong with an instruction on a device, and the cure."""
        match instruction:
            case ins.Barrier() | ins.Pause():
                return None
            case ins.Update(stage, batch=batch):
                return self._stage(device, stage) or self._microbatch(0, batch)
            case ins.Norm(stage, batch) | ins.Clip(stage, batch):
                return self._stage(device, stage) or self._microbatch(0, batch)
            case ins.Run(kind, stage, i, batch=batch):
                return (
                    self._kind(kind, i)
                    or self._stage(device, stage)
                    or self._microbatch(0 if i is None else i, batch)
                )
            case (
                ins.Forward()
                | ins.Recompute()
                | ins.Backward()
                | ins.InputGrad()
                | ins.WeightGrad()
            ):
                stage, i, batch = instruction.stage, instruction.microbatch, instruction.batch
                return self._stage(device, stage) or self._microbatch(i, batch)
        buffer = instruction.buffer
        key = device, type(instruction), *buffer[:4]
        if key not in self._verdicts:
            self._verdicts[key] = self._move(device, instruction, buffer)
        return self._verdicts[key] or self._microbatch(buffer.microbatch, buffer.batch)

    def _kind(self, letter: str, microbatch: int | None) -> tuple[str, str] | None:
        kind = KINDS.get(letter)
        if kind is None or kind.run is None:
            return f"there is no task of your own {letter!r}", "define it with define_task"
        if kind.per_microbatch == (microbatch is None):
            if kind.per_microbatch:
                return "it names no micro-batch", "name one"
            return "it comes once a step, not for a micro-batch", "leave the micro-batch out"
        return None

    def _stage(self, device: int, stage: int) -> tuple[str, str] | None:
        if not 0 <= stage < self.program.stages:
            return f"there is no stage {stage}", f"name one of the {self.program.stages} stages"
        if self.program.placement[stage] != device:
            return (
                f"stage {stage} is on device {self.program.placement[stage]}",
                "move the instruction there",
            )
        return None

    def _microbatch(self, microbatch: int, batch: int) -> tuple[str, str] | None:
        count = self.program.microbatches
        if batch > 0:
            return (
                "it belongs to a later step's batch",
                "let it belong to this step's or an earlier one's",
            )
        if 0 <= microbatch < count:
            return None
        return f"there is no micro-batch {microbatch}", f"name one of the {count}, from 0"

    def _move(
        self,
        device: int,
        instruction: ins.Move,
        buffer: Buffer,
    ) -> tuple[str, str] | None:
        """What is wrong with a move or a free, the micro-batch apart."""
        route = self._routes.get(buffer[:4])
        if route is None:
            return "no edge carries this value", "name a buffer of one of the program's edges"
        made, used = route
        skips = buffer.kind == "skip"
        match instruction:
            case ins.Free():
                right = device in route
                cure = "free it on a device that holds it"
            case ins.Load():
                right = made == HOST and used == device
                cure = "load what the caller gives, on the device that uses it"
            case ins.Output():
                right = used == HOST and made == device
                cure = "hand over what goes to the caller, on the device that makes it"
            case ins.Send() | ins.Stash():
                right = made == device != used and used != HOST
                right = right and skips == isinstance(instruction, ins.Stash)
                cure = (
                    "send what another device uses, on the device that makes it; what skips "
                    "stages is stashed, all else is sent"
                )
            case ins.Receive() | ins.Pop():
                right = used == device != made and made != HOST
                right = right and skips == isinstance(instruction, ins.Pop)
                cure = (
                    "receive what another device makes, on the device that uses it; what was "
                    "stashed is popped, all else is received"
                )
        if right:
            return None
        return f"the value goes from {_device_name(made)} to {_device_name(used)}", cure

    def _home(self, stage: int) -> int:
        return HOST if stage == HOST else self.program.placement[stage]


def _device_name(device: int) -> str:
    return "the caller" if device == HOST else f"device {device}"
