"""The memory that a device holds from instruction to instruction, and its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from fxpipe.extensions.simulator.analysis import live_versions
from fxpipe.extensions.simulator.sizes import Crossing, GraphInput, Piece, Sizes, Storage, Workspace
from fxpipe.extensions.simulator.sums import Gradients, Key, graph_of
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer, Edge, forward_buffer, gradient_buffer, own_buffer

PARTS = ("parameters", "optimizer", "versions", "gradients", "stash", "values", "workspace")
"""The parts of a device's memory: one version of the parameters; optimizer state and buffers;
further versions; sums of gradients; what is kept for backward; values and gradients between stages;
and what the running instruction adds."""


def _adds(x: ins.Instruction) -> bool:
    """Whether it adds to sums of gradients."""
    return x.partial or isinstance(x, ins.Backward | ins.WeightGrad)


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
        """Start before the first instruction, with parameters and what else is always there.

        Args:
            program: all steps in a row.
            sizes: the bytes of everything.
            device: the device.
        """
        self.program, self.sizes, self.device = program, sizes, device
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
        self._used_up: tuple[Piece, ...] = ()
        self._away: list[Key] = []
        self._landing = 0
        self._inside = False
        self._shared = 0
        self._gradients = Gradients(program, sizes, device)
        self._peaks: dict[Hashable, int] = {}
        for stage, home in enumerate(program.placement):
            if home == device:
                self._add("parameters", sizes.parameters.get(stage, 0))
                self._add("optimizer", sizes.optimizer.get(stage, 0))

    def _land(self, stage: int, batch: int, bucket: int) -> None:
        """Replace a bucket of gradients by this replica's part; for a moment both are held."""
        self._away.remove((stage, batch, bucket))
        self._take(self._gradients.part_of(stage, batch, bucket))
        self._landing = max(self._landing, self.bytes)
        self._release(self._gradients.sum_of(stage, batch, bucket))
        self._release(self._gradients.arriving(stage, batch, bucket))

    def run(self, position: int) -> int:
        """Begin an instruction, and return the most bytes while it runs."""
        instruction = self._list[position]
        before, self._landing = self.bytes, 0
        workspace = self._workspace(instruction)
        self._inside = workspace is not None
        self._made.clear()
        if isinstance(instruction, ins.Forward):
            self._begin(instruction)
        for buffer in instruction.makes(self.program):
            pieces = self._kept[buffer] = tuple(filter(None, self._pieces(buffer)))
            self._take(*pieces)
        if _adds(instruction):
            before += self._accumulate(instruction.stage, instruction.batch)
        if instruction.partial:
            self._leave(instruction)
        if instruction.opcode == "all_gather":
            for key in [k for k in self._away if k[:2] == (instruction.stage, instruction.batch)]:
                self._land(*key)
        more = 0
        match instruction:
            case ins.Update():
                more = self._update(instruction, position)
            case ins.OncePerStep(stage, opcode="all_gather"):
                # the parts of all replicas arrive, and are joined in new memory
                more = 2 * self.sizes.gradients.get(stage, 0)
        self._shared = 0
        if isinstance(instruction, ins.InputGrad) and workspace is None:
            # what it leaves is a part of what it uses up, and released with it
            stage = instruction.stage
            kept = self.sizes.saved.get(stage, 0), self.sizes.deferred.get(stage, 0)
            self._shared = min(kept)
        level = self.bytes - self._shared + more
        if workspace is not None:
            level = before + self._peak(instruction, workspace)
        if begins := self._begins(instruction):
            self._release(*self._used_up)
            self._used_up = ()
            level = max(level, self.bytes + self._gradients.arriving(*begins).bytes)
        return max(level, self._landing)

    def _begins(self, instruction: ins.Instruction) -> Key | None:
        """The gradients that an instruction begins to sum, if any."""
        if not instruction.partial and instruction.opcode != "reduce_scatter":
            return None
        return instruction.stage, instruction.batch, getattr(instruction, "bucket", -1)

    def parts_of(self, level: int) -> dict[str, int]:
        """The parts of the bytes that ``run`` has just returned."""
        parts = dict(self.parts)
        for piece in self._made if self._inside else ():
            parts[piece.part] -= piece.bytes
        parts["stash"] -= self._shared
        parts["workspace"] = level - sum(parts.values())
        return parts

    def finish(self, position: int) -> None:
        """End an instruction."""
        instruction = self._list[position]
        for buffer in instruction.ends(self.program):
            self._release(*self._kept.pop(buffer))
        if isinstance(instruction, ins.Forward):
            self._end(instruction)
        elif isinstance(instruction, ins.Update):
            of = instruction.stage, instruction.batch
            ended = (*self._gradients.sums(*of), *self._gradients.parts(*of))
            self._release(*(piece for piece in ended if piece.key in self._count))
        elif begins := self._begins(instruction):
            self._away.append(begins)
            self._take(self._gradients.arriving(*begins))
        elif instruction.opcode == "all_gather":
            self._take(*self._gradients.sums(instruction.stage, instruction.batch))
            self._release(*self._gradients.parts(instruction.stage, instruction.batch))
        elif instruction.opcode == "give":  # the buffer holds them from now on
            self._release(*self._gradients.sums(instruction.stage, instruction.batch))

    def _begin(self, forward: ins.Forward) -> None:
        """Hold the buffers that a forward writes anew, and note that it reads the newest before
        these; the first are the model's."""
        stage = forward.stage
        self._read[stage, forward.microbatch, forward.batch] = self._forwards[stage]
        self._forwards[stage] += 1
        self._take(*self._written(stage, self._forwards[stage]))

    def _end(self, forward: ins.Forward) -> None:
        """Release the values that a forward has read: they are no longer the newest."""
        if number := self._read[forward.stage, forward.microbatch, forward.batch]:
            self._release(*self._written(forward.stage, number))

    def _accumulate(self, stage: int, batch: int) -> int:
        """Hold a stage's sums of gradients; return the bytes that are copied to start new ones."""
        if self._gradients.sum_of(stage, batch, -1).key in self._count:
            return 0
        self._take(*self._gradients.sums(stage, batch))
        return self._started(stage)

    def _started(self, stage: int) -> int:
        """Bytes of earlier gradients to which a step's first ones are added; none on a copy."""
        return self.sizes.started.get(stage, 0) if self._owns(stage) else 0

    def _leave(self, part: Any) -> None:
        """Hold what a part of a backward leaves, and mark what was kept for it as used up."""
        left = self.sizes.left.get(graph_of(part))  # type: ignore[arg-type]
        if left is None:
            return
        stage, i, batch = part.stage, part.microbatch, part.batch
        kept = self.program.kept(stage, i, batch)
        buffer = kept if part.kind == "B" else own_buffer("deferred", stage, i, batch)
        pieces = [p for p in self._kept[buffer] if p.key[0] == "written"]
        pieces.append(Piece("stash", ("left", buffer, part.bucket), left.bytes))
        held = [*((v, False) for v in left.values), *((v, True) for v in left.gradients)]
        pieces += filter(None, (self._near(crossing, stage, i, batch) for crossing in held))
        self._used_up, self._kept[buffer] = self._kept[buffer], tuple(pieces)
        self._take(*pieces)

    def _update(self, update: ins.Update, position: int) -> int:
        """Hold a new version; return what the update needs while it runs."""
        stage = update.stage
        self._add("versions", -self._older.pop(stage, 0))
        # the runtime keeps as many as the delay allows, even if a late update needs fewer
        older = max(self._versions[position] - 1, min(self._delays[stage], update.writes))
        more = older * self.sizes.gradients.get(stage, 0)
        self._older[stage] = more
        self._add("versions", more)
        return self.sizes.updating.get(stage, 0)

    def _workspace(self, instruction: ins.Instruction) -> Workspace | None:
        key = graph_of(instruction)
        if key is None:
            return None
        if _adds(instruction):
            sums = self._gradients.sum_of(instruction.stage, instruction.batch, -1).key
            if sums in self._count or self._started(instruction.stage):
                return self.sizes.adding.get(key, self.sizes.runs.get(key))
        return self.sizes.runs.get(key)

    def _peak(self, instruction: Any, workspace: Workspace) -> int:
        """The most that a graph adds, while it frees what nothing else holds."""
        freed = tuple(self._freed(instruction, workspace)) if workspace.freed else ()
        at = instruction.stage, getattr(instruction, "microbatch", 0)
        copied = tuple([x for x in workspace.laid_out if self._arrives(x.crossing, *at)])
        key = id(workspace), freed, copied
        if key not in self._peaks:
            self._peaks[key] = workspace.peak(freed, copied)
        return self._peaks[key]

    def _freed(self, instruction: Any, workspace: Workspace) -> Iterable[GraphInput]:
        """The arguments of a graph that nothing else holds any more."""
        gone = [p for b in instruction.ends(self.program) for p in self._kept[b]]
        ended = Counter(p.key for p in (*gone, *self._used_up))
        alone: dict[Hashable, GraphInput] = {}
        at = instruction.stage, instruction.microbatch, instruction.batch
        for given in workspace.freed:
            piece = self._near(given.crossing, *at)
            if piece is not None and self._count[piece.key] == ended[piece.key]:
                last = max(given.last, alone.get(piece.key, given).last)
                alone[piece.key] = given._replace(bytes=piece.bytes, last=last)
        return alone.values()

    def _add(self, part: str, size: int) -> None:
        self.parts[part] += size
        self.bytes += size

    def _take(self, *pieces: Piece) -> None:
        for piece in pieces:
            self._count[piece.key] += 1
            if self._count[piece.key] == 1:
                self._add(piece.part, piece.bytes)
                self._made.append(piece)

    def _release(self, *pieces: Piece) -> None:
        for piece in pieces:
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
                yield from self._gradients.sums(source, batch)
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
                yield Piece("stash", buffer, sizes.deferred.get(source, 0))
                for held in sizes.deferred_holds.get(source, ()):
                    yield self._near((held, False), source, i, batch)
                for held in sizes.deferred_gradients.get(source, ()):
                    yield self._near((held, True), source, i, batch)
            case _:
                yield self._value(Edge(source, target, value), i, batch)

    def _written(self, stage: int, number: int) -> Iterator[Piece]:
        """Two pieces that the ``number``-th forward of a stage has written: the buffers that the
        next forward saves, and the others."""
        saved = self.sizes.saved_state.get(stage, 0)
        rest = self.sizes.state.get(stage, 0) - saved
        yield Piece("stash", ("written", stage, number, "saved"), saved)
        yield Piece("stash", ("written", stage, number), rest)

    def _value(self, edge: Edge, i: int, batch: int) -> Piece | None:
        """The memory of a value: one piece for all edges where it was made, else a copy."""
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
        """The memory of a value's gradient along an edge, likewise; the edge's target makes it."""
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
        """The memory in which a stage has one of its inputs or outputs, or the gradient of one."""
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
        """Whether a micro-batch's value or gradient comes to a stage from another device."""
        value, gradient = crossing
        if gradient:
            away = self._from[stage]
            return value in away and not self._is_here(away[value].target, i)
        return value in self._into[stage] and not self._is_here(self._into[stage][value].source, i)

    def _is_here(self, stage: int, i: int) -> bool:
        return self.program.device_of(stage, i) == self.device

    def _owns(self, stage: int) -> bool:
        """Whether the device has a stage's weights themselves, not a copy of them."""
        return self.program.placement[stage] == self.device
