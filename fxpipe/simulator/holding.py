"""What a device holds from instruction to instruction, and what it is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import (
    Buffer,
    Edge,
    fetching,
    forward_buffer,
    gradient_buffer,
    offloaded,
    saved,
)
from fxpipe.simulator.analysis import live_versions
from fxpipe.simulator.sizes import Crossing, Passing, Sizes, Storage, Workspace

PARTS = ("parameters", "optimizer", "versions", "undo", "gradients", "stash", "values", "workspace")
"""What memory is made of: one version of the parameters; optimizer state and buffers; further
versions; what an update can be undone with; sums of gradients; what is kept for backward; values
and gradients between stages; and what the running instruction makes and has not used up."""


_ADDING = (ins.PartialBackward, ins.Backward, ins.WeightGrad)
"""What adds to sums of gradients."""


class Piece(NamedTuple):
    """A piece of memory: the part of PARTS that it counts as, what is in it, and its size."""

    part: str
    key: Hashable
    bytes: int


class Holding:
    """What a device holds.

    Attributes:
        bytes: now, between two instructions.
        parts: now, part → bytes.
    """

    def __init__(self, program: Program, sizes: Sizes, device: int, *, apart: bool) -> None:
        """Before the first instruction: parameters and what else is always there.

        ``apart`` tells that stages read differently late, so that one may be ahead of the slowest
        by more versions than its batches read.
        """
        self.program = program
        self.sizes = sizes
        self.device = device
        self._apart = apart
        self.bytes = 0
        self.parts: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
        self._list = program.lists[device]
        self._count: Counter[Hashable] = Counter()
        self._kept: dict[Buffer, tuple[Piece, ...]] = {}
        self._stored: dict[tuple[int, int, int], list[Piece]] = {}
        self._forwards: Counter[int] = Counter()
        self._read: dict[tuple[int, int, int], int] = {}
        self._into = [{edge.value: edge for edge in edges} for edges in program.edges_into]
        self._from = [
            {edge.value: edge for edge in es if edge.gradient} for es in program.edges_from
        ]
        self._versions = {at: live for at, _, live in live_versions(self._list)}
        self._older: dict[int, int] = {}
        self._delays: Counter[int] = Counter()
        for x in self._list:
            if isinstance(x, ins.Compute):
                self._delays[x.stage] = max(self._delays[x.stage], x.batch - x.version)
        self._made: list[Piece] = []
        self._inside = False
        self._updated = {(x.stage, x.batch) for x in self._list if isinstance(x, ins.Update)}
        self._undo: dict[int, list[Piece]] = {}
        self._ungathered: dict[tuple[int, int], Piece] = {}
        writes = [x.writes for x in self._list if isinstance(x, ins.Update)]
        self._slowest = min(writes, default=1) - 1
        self._peaks: dict[Hashable, int] = {}
        for stage, home in enumerate(program.placement):
            if home == device:
                self._add("parameters", sizes.parameters.get(stage, 0))
                self._add("optimizer", sizes.optimizer.get(stage, 0))

    def reach(self, time: float, everywhere: Mapping[int, float]) -> None:
        """Let go of what nobody can go back to any more: the versions that all stages have now."""
        for version in [v for v in self._undo if everywhere[v] <= time]:
            self._slowest = max(self._slowest, version)
            for piece in self._undo.pop(version):
                self._release(piece)

    def run(self, position: int) -> int:
        """Begin an instruction. Returns the most bytes while it runs."""
        instruction = self._list[position]
        before = self.bytes
        workspace = self._workspace(instruction)
        self._inside = workspace is not None
        self._made.clear()
        if isinstance(instruction, ins.Forward):
            self._begin(instruction)
        for buffer in self.program.writes(instruction):
            pieces = self._kept[buffer] = tuple(filter(None, self._pieces(buffer)))
            for piece in pieces:
                self._take(piece)
        if isinstance(instruction, _ADDING):
            before += self._accumulate(instruction.stage, instruction.batch)
        more = 0
        match instruction:
            case ins.Update():
                more = self._update(instruction, position)
            case ins.ReduceScatter(stage, batch):
                self._take(self._parts(stage, batch, -1))
            case ins.AllGather(stage, batch):
                # by now the parts have gone, and the sums come in their place, twice while joined
                come = sum(piece.bytes for piece in self._come(stage, batch))
                more = self.sizes.gradients.get(stage, 0) - come
            case ins.TakePart(stage, batch):
                self._take(self._part(stage, batch))
            case ins.GatherWeights(stage):
                more = self.sizes.gradients.get(stage, 0)  # what has come is joined in new memory
        if workspace is None:
            return self.bytes + more
        return before + self._peak(instruction, workspace)

    def parts_of(self, level: int) -> dict[str, int]:
        """What the bytes while an instruction runs are made of, after ``run`` has told them."""
        parts = dict(self.parts)
        for piece in self._made if self._inside else ():
            parts[piece.part] -= piece.bytes
        parts["workspace"] = level - sum(parts.values())
        return parts

    def finish(self, position: int) -> None:
        instruction = self._list[position]
        for buffer in self.program.ends(instruction):
            for piece in self._kept.pop(buffer):
                self._release(piece)
        if isinstance(instruction, ins.Forward):
            self._end(instruction)
        elif isinstance(instruction, ins.Update):
            stage, batch = instruction.stage, instruction.batch
            for piece in (self._sums(stage, batch), self._part(stage, batch)):
                if piece.key in self._count:
                    self._release(piece)
        elif isinstance(instruction, ins.PartialBackward):
            self._take(self._parts(instruction.stage, instruction.batch, instruction.bucket))
        elif isinstance(instruction, ins.AllGather | ins.TakePart):
            stage, batch = instruction.stage, instruction.batch
            for piece in self._come(stage, batch):
                self._release(piece)
            if isinstance(instruction, ins.TakePart):
                self._release(self._sums(stage, batch))
        elif isinstance(instruction, ins.GatherWeights):
            stage, batch = instruction.stage, instruction.batch
            if (undo := self._ungathered.pop((stage, batch), None)) is not None:
                self._release(undo)
        elif isinstance(instruction, ins.Give):  # the buffer holds them from now on
            self._release(self._sums(instruction.stage, instruction.batch))

    def _begin(self, forward: ins.Forward) -> None:
        """A forward reads the newest values of the buffers that its stage writes, and makes new
        ones; the first values are the model's."""
        stage = forward.stage
        self._read[stage, forward.microbatch, forward.batch] = self._forwards[stage]
        self._forwards[stage] += 1
        for piece in self._written(stage, self._forwards[stage]):
            self._take(piece)

    def _end(self, forward: ins.Forward) -> None:
        """The values that it read are no longer the newest."""
        if number := self._read[forward.stage, forward.microbatch, forward.batch]:
            for piece in self._written(forward.stage, number):
                self._release(piece)

    def _accumulate(self, stage: int, batch: int) -> int:
        """Hold a stage's sums of gradients. Returns what they start from: copies."""
        piece = self._sums(stage, batch)
        if piece.key in self._count:
            return 0
        self._take(piece)
        return self._started(stage)

    def _started(self, stage: int) -> int:
        """Bytes of gradients that a stage's first ones of a step are added to; none on a copy."""
        return self.sizes.started.get(stage, 0) if self._owns(stage) else 0

    def _update(self, update: ins.Update, position: int) -> int:
        """Hold a new version, and what undoes it. Returns what the update needs besides."""
        stage = update.stage
        self._add("versions", -self._older.pop(stage, 0))
        # there are as many as the delay asks for, though an update that comes late needs fewer
        older = max(self._versions[position] - 1, min(self._delays[stage], update.writes))
        if self._apart:
            older = max(older, update.writes - self._slowest)
        more = older * self.sizes.gradients.get(stage, 0)
        self._older[stage] = more
        self._add("versions", more)
        size = self.sizes.undo.get(stage, 0)
        gathers = stage in self.program.sharded and not self.program.depth
        if gathers:  # the step can go back until its weights are gathered: so far it has a part
            part = self._part(stage, update.batch).bytes
            size = max(size - self.sizes.gradients.get(stage, 0), 0) + part
        undo = Piece("undo", ("undo", stage, update.writes), size)
        self._take(undo)
        if gathers:
            self._ungathered[stage, update.batch] = undo
        else:
            self._undo.setdefault(update.writes, []).append(undo)
        return self.sizes.updating.get(stage, 0)

    def _sums(self, stage: int, batch: int) -> Piece:
        """A stage's sums of gradients; those that no update uses are the caller's, for good."""
        of = batch if (stage, batch) in self._updated or not self._owns(stage) else None
        return Piece("gradients", ("gradients", stage, of), self.sizes.gradients.get(stage, 0))

    def _parts(self, stage: int, batch: int, bucket: int) -> Piece:
        """What the other replicas have of the part of a bucket that is summed here."""
        replicas = self.program.replicas
        of = bucket if stage in self.program.buckets else None
        size = (replicas - 1) * self.sizes.part(stage, replicas - 1, replicas, of)
        return Piece("gradients", ("parts", stage, batch, bucket), size)

    def _come(self, stage: int, batch: int) -> list[Piece]:
        """The same of all buckets."""
        buckets = self.program.buckets.get(stage, 1)
        return [self._parts(stage, batch, bucket) for bucket in range(-1, buckets - 1)]

    def _part(self, stage: int, batch: int) -> Piece:
        """The sum of that part, where it is all that a replica keeps."""
        replicas = self.program.replicas
        part = self.sizes.part(stage, replicas - 1, replicas)
        return Piece("gradients", ("part", stage, batch), part)

    def _workspace(self, instruction: ins.Instruction) -> Workspace | None:
        letter = ins.letter_of(instruction)
        if letter is None:
            return None
        key = letter, instruction.stage  # type: ignore[union-attr]
        if isinstance(instruction, _ADDING):
            sums = self._sums(instruction.stage, instruction.batch).key
            if sums in self._count or self._started(instruction.stage):
                return self.sizes.adding.get(key, self.sizes.runs.get(key))
        return self.sizes.runs.get(key)

    def _peak(self, instruction: Any, workspace: Workspace) -> int:
        """The most that a graph adds: it frees what nobody else holds."""
        freed = tuple(self._freed(instruction, workspace)) if workspace.freed else ()
        at = instruction.stage, getattr(instruction, "microbatch", 0)
        laid_out = [x for x in workspace.laid_out if self._arrives(x.crossing, *at)]
        copied = tuple([Passing(x.bytes, x.last) for x in laid_out])
        key = id(workspace), freed, copied
        if key not in self._peaks:
            self._peaks[key] = workspace.peak(freed, copied)
        return self._peaks[key]

    def _freed(self, instruction: Any, workspace: Workspace) -> Iterator[Passing]:
        """What an instruction alone still holds of what it was given."""
        ended = Counter(p.key for b in self.program.ends(instruction) for p in self._kept[b])
        alone: dict[Hashable, Passing] = {}
        for crossing, _, last in workspace.freed:
            at = instruction.stage, instruction.microbatch, instruction.batch
            piece = self._near(crossing, *at)
            if piece is not None and self._count[piece.key] == ended[piece.key]:
                before = alone.get(piece.key, Passing(piece.bytes, last))
                alone[piece.key] = before._replace(last=max(before.last, last))
        yield from alone.values()

    def _add(self, part: str, size: int) -> None:
        self.parts[part] += size
        self.bytes += size

    def _take(self, piece: Piece) -> None:
        self._count[piece.key] += 1
        if self._count[piece.key] == 1:
            self._add(piece.part, piece.bytes)
            self._made.append(piece)

    def _release(self, piece: Piece) -> None:
        self._count[piece.key] -= 1
        if not self._count[piece.key]:
            del self._count[piece.key]
            self._add(piece.part, -piece.bytes)

    def _pieces(self, buffer: Buffer) -> Iterator[Piece | None]:
        kind, value, source, target, i, batch = buffer
        sizes = self.sizes
        match kind:
            case "weights":
                if not self._owns(source):
                    yield Piece("parameters", buffer, sizes.crossing(buffer))
            case "sums" if self._owns(source):
                yield Piece("gradients", buffer, sizes.crossing(buffer))
            case "sums":
                yield self._sums(source, batch)
            case "grad":
                yield self._gradient(Edge(target, source, value), i, batch)
            case "state":
                if number := self._read.get((source, i, batch), 0):
                    yield from self._written(source, number)
            case "saved":
                yield Piece("stash", buffer, sizes.saved.get(source, 0))
                if number := self._read.get((source, i, batch), 0):
                    yield next(self._written(source, number))
                for held in sizes.holds.get(source, ()):
                    yield self._near((held, False), source, i, batch)
            case "offloaded":
                pieces = self._kept[saved(source, i, batch)]
                ours = Counter(piece.key for piece in pieces)
                alone = [piece for piece in pieces if self._count[piece.key] == ours[piece.key]]
                self._stored[source, i, batch] = alone
                yield from [piece for piece in pieces if piece not in alone]
            case "fetching":
                yield from self._kept[offloaded(source, i, batch)]
                yield from self._stored.pop((source, i, batch))
            case "fetched":
                yield from self._kept[fetching(source, i, batch)]
            case "deferred":
                yield Piece("stash", buffer, sizes.deferred.get(source, 0))
                for held in sizes.deferred_holds.get(source, ()):
                    yield self._near((held, False), source, i, batch)
                for held in sizes.deferred_gradients.get(source, ()):
                    yield self._near((held, True), source, i, batch)
            case _:
                yield self._value(Edge(source, target, value), i, batch)

    def _written(self, stage: int, number: int) -> Iterator[Piece]:
        """The buffers that the ``number``-th forward of a stage has written: those that the next
        one saves, and the others."""
        saved = self.sizes.saved_state.get(stage, 0)
        rest = self.sizes.state.get(stage, 0) - saved
        yield Piece("stash", ("written", stage, number, "saved"), saved)
        yield Piece("stash", ("written", stage, number), rest)

    def _value(self, edge: Edge, i: int, batch: int) -> Piece | None:
        """A value that was made here is one piece for all its edges; what arrives is a copy."""
        stage, size = edge.source, self.sizes.values.get(edge.value, 0)
        if not self._is_here(stage, i):
            return Piece("values", forward_buffer(edge, i, batch), size)
        place = self.sizes.places.get((stage, edge.value, False), Storage(edge.value, False, size))
        if place.value in self._into[stage]:
            return self._near((place.value, False), stage, i, batch)
        if not place.value:
            return None
        return Piece("values", ("made", place.value, i, batch), place.bytes)

    def _gradient(self, edge: Edge, i: int, batch: int) -> Piece | None:
        """The gradient of a value along an edge, likewise: its target makes it."""
        stage, size = edge.target, self.sizes.values.get(edge.value, 0)
        if not self._is_here(stage, i):
            return Piece("values", gradient_buffer(edge, i, batch), size)
        place = self.sizes.places.get((stage, edge.value, True), Storage(edge.value, True, size))
        if not place.value:
            return None
        if place.gradient and place.value in self._from[stage]:
            return self._gradient(self._from[stage][place.value], i, batch)
        if not place.gradient:
            return self._near((place.value, False), stage, i, batch)
        return Piece("values", ("returned", stage, place.value, i, batch), place.bytes)

    def _near(self, crossing: Crossing, stage: int, i: int, batch: int) -> Piece | None:
        """A value that goes into a stage or comes from it, or its gradient, as the stage has it."""
        value, gradient = crossing
        into, away = self._into[stage], self._from[stage]
        size = self.sizes.laid_out.get((stage, value, gradient))
        if size is not None and self._arrives(crossing, stage, i):
            part = "values" if gradient else "stash"
            return Piece(part, ("laid out", stage, value, gradient, i, batch), size)
        if not gradient:
            return self._value(into.get(value, Edge(stage, stage, value)), i, batch)
        return self._gradient(away[value] if value in away else into[value], i, batch)

    def _arrives(self, crossing: Crossing, stage: int, i: int) -> bool:
        """Whether another device hands a micro-batch's value, or a gradient, to a stage."""
        value, gradient = crossing
        if gradient:
            away = self._from[stage]
            return value in away and not self._is_here(away[value].target, i)
        return value in self._into[stage] and not self._is_here(self._into[stage][value].source, i)

    def _is_here(self, stage: int, i: int) -> bool:
        return self.program.device_of(stage, i) == self.device

    def _owns(self, stage: int) -> bool:
        """Whether the device has a stage's weights, and not a copy of them."""
        return self.program.placement[stage] == self.device
