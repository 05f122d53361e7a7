"""What a device holds from instruction to instruction, and when it holds the most."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from fxpipe.extensions.simulator.simulation import Simulation
from fxpipe.extensions.simulator.sizes import Crossing, GraphInput, Sizes, Storage, Workspace
from fxpipe.ir import instruction as ins
from fxpipe.ir.effects import Piece, Spaces
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer, Edge, own_buffer
from fxpipe.torchtools.pytrees import in_blocks

PARTS = (
    *("parameters", "optimizer", "versions", "gradients", "saved", "values", "workspace"),
    "besides",
)
"""The parts of a device's memory: one version of the parameters; optimizer state and buffers;
further versions; sums of gradients; what is kept for backward; values and gradients between stages;
what the running instruction adds; and what the device and the allocator take besides."""


@dataclass(frozen=True)
class Memory:
    """What a device holds over time.

    Attributes:
        peak: the most bytes at once.
        time: when it holds that many for the first time.
        position: the position of the instruction that runs then.
        levels: for each instruction, in order, the bytes while it runs.
        resting: the bytes of parameters and optimizer state before the first instruction.
        parts: part of the peak, as in ``PARTS`` → its bytes.
    """

    peak: int
    time: float
    position: int
    levels: tuple[int, ...] = field(repr=False)
    resting: int = 0
    parts: Mapping[str, int] = field(default_factory=dict, repr=False)


def memory_over_time(simulation: Simulation, sizes: Sizes) -> tuple[Memory, ...]:
    """Device → its memory.

    While a graph runs whose workspace is known, its memory is the most that its nodes hold. For
    other instructions, outputs count from the start, and inputs that are used up count until the
    end. A value that arrives counts from its receive, or, with ``sizes.early``, from when that
    is posted. Memory that several buffers share counts once, until the last
    of them is gone. Devices with streams take and free memory in the order of their launches.
    """
    program = simulation.launched or simulation.program
    held = [
        _memory(simulation, Holding(program, sizes, device)) for device in range(simulation.devices)
    ]
    return tuple(_with_besides(memory, sizes) for memory in held)


def _with_besides(memory: Memory, sizes: Sizes) -> Memory:
    """The same with what a device and its allocator take besides."""
    if not sizes.context and sizes.reserved == 1:
        return memory

    def taken(level: int) -> int:
        return sizes.context + ceil(sizes.reserved * level)

    peak = taken(memory.peak)
    return replace(
        memory,
        peak=peak,
        levels=tuple(map(taken, memory.levels)),
        resting=taken(memory.resting),
        parts={**memory.parts, "besides": peak - memory.peak},
    )


def _launches(simulation: Simulation, device: int) -> tuple[list[int], list[float]]:
    """For each instruction in the order of launches: its position in the simulated list, and when
    it is launched. An arrival follows the instruction before it at once."""
    list_, starts = simulation.program.lists[device], simulation.events.starts[device]
    if simulation.launched is None:
        return [*range(len(list_))], [*starts]
    places: defaultdict[ins.Instruction, deque[int]] = defaultdict(deque)
    for at, x in enumerate(list_):
        places[x].append(at)
    order, begun, now = list[int](), list[float](), 0.0
    for x in simulation.launched.lists[device]:
        order.append(places[x].popleft())
        now = now if isinstance(x, ins.Arrival) else max(now, starts[order[-1]])
        begun.append(now)
    return order, begun


def _early(
    simulation: Simulation, holding: Holding, starts: Sequence[float]
) -> list[tuple[float, int, int]]:
    """For each value that is in memory before its receive: since when, the position of its receive
    and its bytes. Its memory is taken when its receive is posted, at an earlier receive."""
    if not (ahead := holding.sizes.early):
        return []
    list_ = holding.program.lists[holding.device]
    places: defaultdict[int, list[int]] = defaultdict(list)
    posted = []
    for at, x in enumerate(list_):
        if isinstance(x, ins.Receive):
            before = places[simulation.program.ends_of(x.buffer)[0]]
            since = starts[before[-ahead]] if len(before) >= ahead else 0.0
            posted.append((since, at, holding.arriving(x.buffer)))
            before.append(at)
    return sorted(posted)


def _memory(simulation: Simulation, holding: Holding) -> Memory:
    order, starts = _launches(simulation, holding.device)
    resting = holding.bytes
    levels = [0] * len(order)
    early = deque(_early(simulation, holding, starts))
    waiting: dict[int, int] = {}
    peak, parts = -1, dict(holding.parts)
    for position, start in enumerate(starts):
        while early and early[0][0] <= start:
            _, received, size = early.popleft()
            waiting[received] = size
        waiting = {received: size for received, size in waiting.items() if received > position}
        level, beside = holding.run(position), sum(waiting.values())
        levels[order[position]] = level + beside
        if level + beside > peak:
            peak, parts = level + beside, holding.parts_of(level)
            parts["values"] += beside
        holding.finish(position)
    if not levels:
        return Memory(resting, 0, 0, (), resting, parts)
    position = levels.index(peak)
    time = simulation.events.starts[holding.device][position]
    return Memory(peak, time, position, tuple(levels), resting, parts)


class Holding:
    """The memory that a device holds, updated instruction by instruction.

    Attributes:
        program: all steps in a row.
        sizes: the bytes of everything.
        device: the device.
        bytes: what it holds now, between two instructions.
        parts: part of memory → its bytes now.
    """

    def __init__(self, program: Program, sizes: Sizes, device: int) -> None:
        """Start before the first instruction, with parameters and what else is always there."""
        self.program, self.sizes, self.device = program, sizes, device
        self.bytes = 0
        self.parts: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
        self._list = program.lists[device]
        self._count: Counter[Hashable] = Counter()
        self._there: dict[Hashable, Piece] = {}  # those that are counted
        self._kept: dict[Buffer, tuple[Piece, ...]] = {}
        self._stored: dict[tuple[int, int, int], list[Piece]] = {}
        stages = range(program.stages)
        self._into = [{edge.value: edge for edge in program.edges_into(s)} for s in stages]
        self._back = [{edge.value: edge for edge in program.gradients_into(s)} for s in stages]
        self._older: dict[int, int] = {}
        self._updated = {(x.stage, x.batch) for x in self._list if isinstance(x, ins.Update)}
        self._delays: Counter[int] = Counter()
        for x in self._list:
            if isinstance(x, ins.Compute):
                self._delays[x.stage] = max(self._delays[x.stage], x.batch - x.version)
        self._made: list[Piece] = []
        self._spaces = Spaces()
        self._handed: dict[int, list[Piece]] = {}  # batch → what the caller keeps of it
        self._inside = False
        self._shared = 0
        self._peaks: dict[Hashable, int] = {}
        for stage, home in enumerate(program.placement):
            if home == device:
                self._add("optimizer", sizes.optimizer.get(stage, 0))
        self._take(*self._resting())

    def _resting(self) -> list[Piece]:
        """What it has of its stages' weights before the first instruction: what the last one of
        each stage leaves that provides or removes some of it, or all."""
        homes = enumerate(self.program.placement)
        found = {self.weights(s).key: self.weights(s) for s, home in homes if home == self.device}
        for x in self._list:
            if x.provides or x.removes:
                spaces = x.spaces(self)
                for piece in (*spaces.freed, *spaces.over):
                    found.pop(piece.key, None)
                found |= {piece.key: piece for piece in (*spaces.first, *spaces.then)}
        return [*found.values()]

    def run(self, position: int) -> int:
        """Begin an instruction, and return the most bytes while it runs."""
        instruction = self._list[position]
        before = self.bytes
        workspace = self._workspace(instruction)
        self._inside = workspace is not None
        self._made.clear()
        for buffer in instruction.makes(self.program):
            pieces = self._kept[buffer] = tuple(filter(None, self._pieces(buffer)))
            self._take(*pieces)
        if instruction.adds:
            sums = self.sums(instruction.stage, instruction.batch)
            if sums.key not in self._count:
                self._take(sums)
        self._spaces = spaces = instruction.spaces(self)
        self._take(*spaces.first)
        self._free(spaces.freed)
        more = spaces.during
        match instruction:
            case ins.Update():
                more = self._update(instruction)
            case ins.Output(buffer) if buffer.value in self.sizes.handed:
                self._hand_over(buffer)
        self._shared = 0
        if isinstance(instruction, ins.InputGrad) and workspace is None:
            # what it leaves is a part of what it uses up, and released with it
            stage = instruction.stage
            kept = self.sizes.saved.get(stage, 0), self.sizes.deferred.get(stage, 0)
            self._shared = min(kept)
        level = self.bytes - self._shared + more
        if workspace is not None:
            level = before + self._peak(instruction, workspace)
        if instruction.partial:
            self._shrink(instruction)
        if spaces.then:
            level = max(level, self.bytes + sum(piece.bytes for piece in spaces.then))
        return level

    def parts_of(self, level: int) -> dict[str, int]:
        """The parts of the bytes that ``run`` has just returned."""
        parts = dict(self.parts)
        for piece in self._made if self._inside else ():
            parts[piece.part] -= piece.bytes
        parts["saved"] -= self._shared
        parts["workspace"] = level - sum(parts.values())
        return parts

    def finish(self, position: int) -> None:
        """End an instruction."""
        instruction = self._list[position]
        for buffer in instruction.ends(self.program):
            self._release(*self._kept.pop(buffer))
        self._free(self._spaces.over)
        self._take(*self._spaces.then)

    def _hand_over(self, buffer: Buffer) -> None:
        """Hold a value for the caller, and no more what it has had of steps that are over."""
        over = buffer.batch - max(self._delays.values(), default=0)
        for batch in [batch for batch in self._handed if batch < over]:
            self._release(*self._handed.pop(batch))
        size = self.blocks(self.sizes.values.get(buffer.value, 0))
        for piece in self._kept[buffer]:
            if piece.bytes > size:  # the caller keeps a copy, not the whole memory
                piece = Piece("values", ("handed", buffer), size)
            self._take(piece)
            self._handed.setdefault(buffer.batch, []).append(piece)

    def weights(self, stage: int) -> Piece:
        """A stage's whole weights."""
        return Piece("parameters", ("weights", stage), self.sizes.parameters.get(stage, 0))

    def sums(self, stage: int, batch: int) -> Piece:
        """A stage's sums of gradients. If no update uses them, they are for all batches."""
        of = batch if (stage, batch) in self._updated or not self._owns(stage) else None
        return Piece("gradients", ("sum", stage, of), self.sizes.gradients.get(stage, 0))

    def _update(self, update: ins.Update) -> int:
        """Hold a new version; return what the update needs while it runs. The runtime keeps as many
        as the delay allows, even if a late update needs fewer."""
        stage = update.stage
        self._add("versions", -self._older.pop(stage, 0))
        older = min(self._delays[stage], update.writes)
        self._older[stage] = more = older * self.sizes.gradients.get(stage, 0)
        self._add("versions", more)
        return self.sizes.updating.get(stage, 0)

    def _workspace(self, instruction: ins.Instruction) -> Workspace | None:
        key = _graph_of(instruction)
        if key is None:
            return None
        if instruction.adds:
            if self.sums(instruction.stage, instruction.batch).key in self._count:
                return self.sizes.adding.get(key, self.sizes.runs.get(key))
        return self.sizes.runs.get(key)

    def _peak(self, instruction: Any, workspace: Workspace) -> int:
        """The most that a graph adds, while it frees what nothing else holds."""
        freed = tuple(self._freed(instruction, workspace)) if workspace.freed else ()
        key = id(workspace), freed
        if key not in self._peaks:
            self._peaks[key] = workspace.peak(freed)
        return self._peaks[key]

    def _freed(self, instruction: Any, workspace: Workspace) -> Iterable[GraphInput]:
        """The arguments of a graph that nothing else holds any more."""
        ended = Counter(p.key for b in self._used_up(instruction) for p in self._kept[b])
        alone: dict[Hashable, GraphInput] = {}
        at = instruction.stage, instruction.microbatch, instruction.batch
        for given in workspace.freed:
            piece = self._near(given.crossing, *at)
            if piece is not None and self._count[piece.key] == ended[piece.key]:
                last = max(given.last, alone.get(piece.key, given).last)
                alone[piece.key] = given._replace(bytes=piece.bytes, last=last)
        return alone.values()

    def _used_up(self, instruction: ins.Instruction) -> Sequence[Buffer]:
        """The buffers that an instruction uses up; a part of a backward those of the whole."""
        if not instruction.partial:
            return instruction.ends(self.program)
        return [buffer for buffer in instruction.uses(self.program) if buffer.kind != "grad"]

    def _shrink(self, part: Any) -> None:
        """Release of what was kept for a backward the share of a bucket that is complete."""
        left = self.program.buckets[part.stage] - part.bucket
        for buffer in self._used_up(part):
            pieces = [*self._kept[buffer]]
            for at, piece in enumerate(pieces):
                if piece.part == "saved" and self._count[piece.key] == 1:
                    pieces[at] = piece._replace(bytes=piece.bytes * (left - 1) // left)
                    self._there[piece.key] = pieces[at]
                    self._add("saved", pieces[at].bytes - piece.bytes)
            self._kept[buffer] = tuple(pieces)

    def arriving(self, buffer: Buffer) -> int:
        """The bytes of the memory in which a value arrives."""
        return self.blocks(self.sizes.crossing(buffer))

    def blocks(self, size: int) -> int:
        """The bytes that the device allocates for so many."""
        return in_blocks(size, self.sizes.block)

    def _add(self, part: str, size: int) -> None:
        self.parts[part] += size
        self.bytes += size

    def _take(self, *pieces: Piece) -> None:
        for piece in pieces:
            self._count[piece.key] += 1
            if self._count[piece.key] == 1:
                self._there[piece.key] = piece
                self._add(piece.part, piece.bytes)
                self._made.append(piece)

    def _release(self, *pieces: Piece) -> None:
        for piece in pieces:
            self._count[piece.key] -= 1
            if not self._count[piece.key]:
                del self._count[piece.key]
                held = self._there.pop(piece.key)
                self._add(held.part, -held.bytes)

    def _free(self, pieces: Iterable[Piece]) -> None:
        """Release those of some pieces that are there."""
        self._release(*(piece for piece in pieces if piece.key in self._count))

    def _pieces(self, buffer: Buffer) -> Iterator[Piece | None]:
        kind, value, source, target, i, batch = buffer
        sizes = self.sizes
        match kind:
            case "weights":
                if not self._owns(source):
                    yield Piece("parameters", buffer, self.arriving(buffer))
            case "sums" if self._owns(source):
                yield Piece("gradients", buffer, self.arriving(buffer))
            case "sums":
                yield self.sums(source, batch)
            case "state":
                yield Piece("saved", buffer, sizes.state.get(source, 0))
            case "saved":
                yield Piece("saved", buffer, sizes.saved.get(source, 0))
                for held in sizes.holds.get(source, ()):
                    yield self._near((held, False), source, i, batch)
            case "offloaded":
                from fxpipe.extensions.offload.opcodes import stored

                away = stored(self.program, source, i, batch)
                pieces = [piece for b in away for piece in self._kept[b]]
                ours = Counter(p.key for b in away if b.kind != "in" for p in self._kept[b])
                alone = [piece for piece in pieces if self._count[piece.key] == ours[piece.key]]
                self._stored[source, i, batch] = alone
                yield from [piece for piece in pieces if piece not in alone]
            case "fetching":
                yield from self._kept[own_buffer("offloaded", source, i, batch)]
                yield from self._stored.pop((source, i, batch))
            case "fetched":
                yield from self._kept[own_buffer("fetching", source, i, batch)]
            case "deferred":
                yield Piece("saved", buffer, sizes.deferred.get(source, 0))
                for crossing in sizes.deferred_holds.get(source, ()):
                    yield self._near(crossing, source, i, batch)
            case _:
                yield self._crossing(Edge(source, target, value, kind == "grad"), i, batch)

    def _crossing(self, edge: Edge, i: int, batch: int) -> Piece | None:
        """The memory of a value along an edge: one piece for all edges where it was made, else a
        copy."""
        stage = edge.source
        size = self.blocks(self.sizes.values.get(edge.value, 0))
        if self.program.device_of(stage, i) != self.device:
            return Piece("values", edge.buffer(i, batch), size)
        crossing = edge.value, edge.gradient
        home, whole = self.sizes.places.get((stage, *crossing), Storage(crossing, size))
        if home is None:
            return None
        if home[0] in (self._back if home[1] else self._into)[stage]:
            return self._near(home, stage, i, batch)
        return Piece("values", ("made", stage, home, i, batch), whole)

    def _near(self, crossing: Crossing, stage: int, i: int, batch: int) -> Piece | None:
        """The memory in which a stage has a value that its forward, or its backward, reads or
        makes."""
        value, gradient = crossing
        arriving = (self._back if gradient else self._into)[stage].get(value)
        return self._crossing(arriving or Edge(stage, stage, value, gradient), i, batch)

    def _owns(self, stage: int) -> bool:
        """Whether the device has a stage's weights themselves, not a copy of them."""
        return self.program.placement[stage] == self.device


def _graph_of(instruction: ins.Instruction) -> tuple[str, int] | None:
    """The key of a task's graph in ``Sizes.runs``; None for other instructions. Of a backward that
    runs in parts the first holds what a whole one does, and the others hold less."""
    later = getattr(instruction, "rest", False) or getattr(instruction, "bucket", 0) > 0
    letter = instruction.letter
    return None if letter is None or later else (letter, instruction.stage)
