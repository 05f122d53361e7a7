"""Programs are verified by running them on nothing: stores that hold names of buffers alone.

Each device runs one batch, alone: what it takes from another is there once it is received. Values
on their way, and devices that wait for each other, are verified in ``fxpipe.verify.channels``. All
that is known of an instruction is what its class declares.

Where batches overlap, a program is a window that repeats. One batch runs the instructions of a
device that are for it, in the order of (−batch, position), and no other instruction touches its
values. The first steps and the flush leave out whole batches, so a batch that exists runs all of
its instructions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import chain

from fxpipe.errors import Fault
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import HOST, Buffer
from fxpipe.text.program import print_instruction
from fxpipe.verify.alone import window_of, wrong_alone
from fxpipe.verify.tasks import Spot, microbatches_text, too_early

Life = list[tuple[int, ins.Instruction]]
"""Position and instruction of what a device runs for a batch, in order. Batches and versions are
relative to that batch: all have batch 0, and read version 0 if all earlier batches are applied."""


class AbstractRun:
    """A run of one batch of a program on nothing.

    Attributes:
        program: the program.
        window: its compute instructions, as tasks.
        wrong: place → what is wrong with the instruction by itself; the run leaves these out.
        lives: device → its life.
        outputs: the buffers that the caller has got.
        updates: whether weights change.
        parted: whether barriers part gradients from updates.
        pauses: whether it pauses.
        versions: stage and micro-batch → the version that its forward reads; with None for a
            micro-batch, the oldest of the stage.
        complete: stage → device, step and position behind which its next version is complete.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.window = window_of(program)
        wrong = {**self.window.wrong, **dict(wrong_alone(program))}
        self.wrong = {place: wrong[place] for place in sorted(wrong)}
        self.lives = [self._life(device) for device in range(program.devices)]
        self.outputs: set[Buffer] = set()
        instructions = [x for _, x in chain(*self.lives)]
        meetings = {type(x) for x in instructions if isinstance(x, ins.Meeting)}
        self.updates = any(x.after_barrier for x in chain(*program.lists))
        delayed = any(x.letter == "F" and getattr(x, "version", 0) < 0 for x in instructions)
        # where batches overlap or read older versions there is no barrier
        self.parted = bool(meetings) or not (program.depth or delayed)
        self.pauses = ins.Pause in meetings
        self.versions: dict[tuple[int, int | None], int] = {}
        self.complete: dict[int, tuple[int, int, int]] = {}
        for device, life in enumerate(self.lives):
            for position, x in life:
                if x.letter == "F" and isinstance(x, ins.Compute):
                    self.versions.setdefault((x.stage, x.microbatch), x.version)
                    oldest = self.versions.get((x.stage, None), x.version)
                    self.versions[x.stage, None] = min(oldest, x.version)
                # where each replica updates a part, the version is there once all are gathered
                elif x.completes and not (x.after_barrier and x.stage in self.complete):
                    self.complete[x.stage] = device, *self.moment(device, position)

    def fault(self, device: int, position: int, what: str, cure: str) -> Fault:
        """Make a fault of the instruction at a place."""
        return Fault(what, cure, device, position, self.text(device, position))

    def text(self, device: int, position: int) -> str:
        """The text of an instruction."""
        return print_instruction(self.program.lists[device][position])

    def moment(self, device: int, position: int) -> tuple[int, int]:
        """When a batch runs an instruction: in which of its steps, from 0, and at which place."""
        return -self.program.lists[device][position].batch, position

    def faults(self) -> Iterator[Fault]:
        """Run the batch on each device; yield the faults of all."""
        for device in range(self.program.devices):
            for position, wrong in _Device(self, device).run():
                yield self.fault(device, position, *wrong)

    def _life(self, device: int) -> Life:
        life = list(enumerate(self.program.lists[device]))
        if self.wrong:
            life = [(p, x) for p, x in life if (device, p) not in self.wrong]
        if not self.program.depth:
            return life
        life.sort(key=lambda entry: -entry[1].batch)
        return [(p, x.later(-x.batch) if x.batch else x) for p, x in life]


class _Device:
    """One device, as it runs a batch. Its methods yield what is wrong with an instruction."""

    def __init__(self, ran: AbstractRun, device: int) -> None:
        self._ran, self._device, self._program = ran, device, ran.program
        self._life = ran.lives[device]
        # stage, kind and micro-batch, or "all" → when it is done the last time; see Instruction
        self._done: dict[tuple[int, str, int | str | None], tuple[int, int]] = {}
        for position, x in self._life:
            if not (x.partial or isinstance(x, ins.Move | ins.Meeting)):
                i, at = getattr(x, "microbatch", None), ran.moment(device, position)
                kind = x.stands_for.letter if x.stands_for else x.letter or x.opcode
                for given in (kind, "gradients") if x.sums else (kind,):
                    self._done[x.stage, given, i] = self._done[x.stage, given, "all"] = at
        self._there: dict[Buffer, bool] = {}
        self._latest: dict[int, ins.Instruction] = {}  # of a stage
        self._taken: dict[int, dict[str, int]] = {}  # stage → who has its gradients → its position
        self._updated: set[int] = set()
        self._passed = self._resumed = False

    @cached_property
    def _made(self) -> dict[Buffer, int]:
        """Buffer → the last position that makes it."""
        return {buffer: at for at, x in self._life for buffer in x.makes(self._program)}

    def run(self) -> Iterator[tuple[int, ins.Wrong]]:
        """Yield what is wrong, and at which position."""
        ran, passes = self._ran, self._program.passes
        tasks, trains = ran.window.spots, ran.window.trains
        lowered, communicated = "lower" in passes, "communicate" in passes
        for position, x in self._life:
            if lowered and not isinstance(x, ins.Move):
                found = [*x.misfits(tasks, trains), self._parted(x) if ran.parted else None]
                if not isinstance(x, ins.Meeting):
                    found += [*self._ordered(position, x), self._of_version(position, x)]
                yield from [(position, wrong) for wrong in found if wrong is not None]
            if communicated:
                yield from [(position, wrong) for wrong in self._stored(x)]
                if ran.pauses and (wrong := self._paused(x)) is not None:
                    yield position, wrong
        for buffer, there in self._there.items() if "free" in passes else ():
            if there:
                what = f"{buffer} is still there when its batch is through"
                yield self._made[buffer], (what, "free it after its last use")

    def _parted(self, x: ins.Instruction) -> ins.Wrong | None:
        """A barrier separates all gradients from all updates, and there is no other.

        With it, a failure before the first update leaves every weight as it was. Where batches
        overlap or read older versions there is none, and a failure ends the pipe.
        """
        overlaps = self._program.depth > 0
        if isinstance(x, ins.Meeting):
            if overlaps:
                return "batches overlap, and none may wait here", "remove it"
            if isinstance(x, ins.Barrier) and not self._ran.updates:
                return "no update follows", "remove it"
            self._passed = self._passed or isinstance(x, ins.Barrier)
        elif x.after_barrier and not self._passed and not overlaps:
            return "no barrier comes before it", "put one on every device"
        elif x.before_barrier and self._passed:
            return "it comes after a barrier", "move the barrier behind it"
        return None

    def _ordered(self, position: int, x: ins.Instruction) -> Iterator[ins.Wrong | None]:
        """What comes before it on its stage: what it needs, its other parts, its gradients."""
        stage, i, done = x.stage, getattr(x, "microbatch", None), self._done
        here = self._ran.moment(self._device, position)
        late = here
        for kind in x.needs:
            for key in ("all",) if i is None else (i, None):
                late = max(late, done.get((stage, kind, key), late))
        if late > here:
            at, on = (Spot(self._device, p, -steps) for steps, p in (here, late))
            yield too_early(self._ran.window, at, on)
        taken = self._taken.setdefault(stage, {})
        taken.pop(x.restores, None)
        if taken and x.reads_gradients:
            on_position = [*taken.values()][-1]
            taker = self._program.lists[self._device][on_position]
            became, cure = taker.spends or ("", "")
            what = f"{print_instruction(taker)}, position {on_position}, has {became}"
            yield f"it needs gradients that {what}", cure
        if x.spends is not None:
            taken[x.letter or ""] = position
        if not x.takes:
            return  # it only frees, and may come between parts
        before = self._latest.get(stage)
        self._latest[stage] = x
        if before is not None and (cure := before.then(x)):
            yield f"it comes right behind {print_instruction(before)}", cure
        else:
            yield x.behind(before)

    def _of_version(self, position: int, x: ins.Instruction) -> ins.Wrong | None:
        """All instructions of a micro-batch on a stage read version t − d of its weights in batch
        t, with the same d in all batches; a version before the first stands for the first. Those
        that run once a step read the oldest version that a micro-batch reads. The update of batch
        t makes version t + 1 of version t.
        """
        ran, (steps, _) = self._ran, self._ran.moment(self._device, position)
        if "writes" in x.counted:
            self._updated.add(x.stage)
            reads, writes = (getattr(x, name) for name in ("reads", "writes"))
            if (reads, writes) == (0, 1):
                return None
            return (
                f"it makes version {writes - steps} of version {reads - steps}",
                f"write v{-steps} -> v{1 - steps}: an update makes the next version of the newest",
            )
        if "version" not in x.counted:
            return None
        version: int = getattr(x, "version")  # noqa: B009
        right = ran.versions.get((x.stage, getattr(x, "microbatch", None)), version)
        why = "its forward read"
        if not ran.window.trains:
            right, why = 0, "without a backward there is only"
        if self._device != self._program.placement[x.stage]:
            right, why = 0, "a copy has only"
        if not x.before_barrier:
            right, why = 1 if x.stage in self._updated else right, "its batch reads here"
        if version != right:
            return (
                f"it reads version {version - steps}, and {why} version {right - steps}",
                f"write v{right - steps}",
            )
        # version t + v is made by the update of batch t + v − 1, in the step of that number minus
        # the ``batch`` of the update; without updates there is only version 0, the caller's
        newest = 0
        device, made, at = ran.complete.get(x.stage, (None, 0, 0))
        if device == self._device:
            newest = steps - made + (at < position)  # the last that is made before this moment
        if version <= newest:
            return None
        return (
            f"version {version - steps} does not exist here",
            f"read version {newest - steps}, or an older one, for all of its micro-batch",
        )

    def _stored(self, x: ins.Instruction) -> Iterator[ins.Wrong]:
        """A device makes a buffer once, then reads it, then ends it at most once."""
        there, reads = self._there, x.uses(self._program)
        for buffer in reads:
            if not there.get(buffer):
                yield self._absent(buffer)
        for buffer in x.makes(self._program):
            if buffer in there:
                yield f"{buffer} was made before", "make it once"
            there[buffer] = True
        for buffer in x.ends(self._program):
            if not there.get(buffer) and buffer not in reads:
                yield self._absent(buffer)
            if buffer in there:
                there[buffer] = False
        if isinstance(x, ins.Output):
            if x.buffer in self._ran.outputs:
                yield "the caller has it already", "keep one"
            self._ran.outputs.add(x.buffer)

    def _absent(self, buffer: Buffer) -> ins.Wrong:
        """Why a buffer is not there, and what to do about it."""
        if buffer in self._there:
            return f"{buffer} is freed already", "free it once, after its last use"
        if buffer in self._made:
            return f"{buffer} is made only at position {self._made[buffer]}", "move that before it"
        return f"{buffer} is never made on this device", "load, receive or compute it before"

    def _paused(self, x: ins.Instruction) -> ins.Wrong | None:
        """Outputs come before the pause, and gradients go to and fro after it."""
        match x:
            case ins.Pause() if self._resumed:
                return "there is a pause before it", "keep one"
            case ins.Pause():
                self._resumed = True
            case ins.Load(Buffer(kind="in")) | ins.Output(Buffer(kind="out")) if self._resumed:
                return "it comes after the pause", "move it before the pause"
            case ins.Load(Buffer(kind="grad")) | ins.Output(Buffer(kind="grad")):
                if not self._resumed:
                    return "it comes before the pause", "move it after the pause"
        return None


def missing(ran: AbstractRun) -> Iterator[Fault]:
    """Report outputs and gradients of inputs that the caller never gets, once the batch has run."""
    program = ran.program
    gradients = program.gradients if ran.window.trains else ()
    for edge in (*program.edges, *gradients):
        lacking = [i for i in range(program.microbatches) if edge.buffer(i) not in ran.outputs]
        if edge.target == HOST and lacking:
            yield Fault(
                f"the caller never gets {edge.kind} {edge.value} of {microbatches_text(lacking)}",
                "add an output after the instruction that makes it",
                program.device_of(edge.source, lacking[0]),
                subject=f"edge {edge}",
            )
