"""The verifier of a Program: that it runs to its end and computes what its schedule says."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral

from fxpipe.errors import Fault, InputError, VerificationError
from fxpipe.extend import find
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.task import BUILT_IN
from fxpipe.ir.walk import Key, needs_of
from fxpipe.text.program import print_instruction
from fxpipe.torchtools.state import without_collection
from fxpipe.verify import flow
from fxpipe.verify.facts import Facts
from fxpipe.verify.plan import edge_faults
from fxpipe.verify.tasks import (
    Window,
    ascending,
    complete,
    counts_faults,
    dependencies,
    gradients_used_up,
)


@without_collection()
def verify_program(program: Program, channel: int | None = None) -> Program:
    """Return the program, or raise VerificationError with every fault.

    The time is proportional to the number of instructions.

    Args:
        program: the program.
        channel: how many values may be in flight from one device to another, as in ``flow.stuck``.

    Raises:
        VerificationError: with every fault.
        InputError: the channel is negative, or not a whole number.
    """
    if channel is not None and not (isinstance(channel, Integral) and channel >= 0):
        raise InputError(f"channel is {channel!r}; give at least 0, as a whole number, or None")
    faults = list(_frame(program)) or _faults(program, channel)
    if faults:
        raise VerificationError(f"program {program.name!r}", faults, program)
    return program


def _faults(program: Program, channel: int | None) -> list[Fault]:
    facts = Facts(program)
    faults = [facts.fault(*place, *wrong) for place, wrong in facts.wrong.items()]
    for rule in [rule for name in _RULES if name in program.passes for rule in _RULES[name]]:
        faults.extend(rule(facts))
    if "communicate" in program.passes:
        faults.extend(flow.stuck(facts, channel))
    return faults


def smallest_channel(program: Program) -> int:
    """The fewest values that each channel must hold so that no device gets stuck.

    Raises:
        VerificationError: the program is wrong, or gets stuck on channels of any size.
    """
    verify_program(program)
    facts = Facts(program)
    most = 1
    while any(flow.stuck(facts, most)):
        most *= 2
    # more room is never worse: a send then waits for an earlier receive
    return bisect(range(most), False, key=lambda channel: not any(flow.stuck(facts, channel)))


def _frame(program: Program) -> Iterator[Fault]:
    """Check the counts, the placement and the edges, without which nothing else can be judged."""
    lists = program.lists
    older = (abs(x.version - x.batch) for row in lists for x in row if isinstance(x, ins.Compute))
    yield from counts_faults(
        program.microbatches,
        program.placement,
        program.devices,
        sum(map(len, lists)) if {"lower", "communicate"} & {*program.passes} else None,
        max(program.depth, max(older, default=0)),
    )
    if program.launches and list(map(len, program.launches)) != list(map(len, program.lists)):
        yield Fault(
            f"its devices have {_counts(program.launches)} launches for "
            f"{_counts(program.lists)} instructions",
            "give each instruction its launch, or none of them",
        )
    elif "streams" in program.passes and not program.launches and any(program.lists):
        yield Fault("its instructions have streams and no launches", "run the pass streams again")
    if program.replicas < 1:
        yield Fault(f"it has {program.replicas} replicas", "give it at least 1")
    if program.copies:
        misplaced = find("option", "copies_faults", f"program {program.name!r}")
        yield from misplaced(program.placement, program.copies, program.devices)
        if program.replicas > 1 or program.depth:
            what = "it has copies of stages, and several replicas or batches that overlap"
            yield Fault(what, "give it one replica and a flush, or no copies")
    yield from edge_faults(program.edges, program.stages)


def _counts(lists: Sequence[Sequence[object]]) -> str:
    return ", ".join(str(len(instructions)) for instructions in lists) or "no"


def _tasks(facts: Facts) -> Iterator[Fault]:
    yield from complete(facts.window, bool(facts.updates), facts.program.replicas)
    if facts.program.copies:
        name = facts.program.name
        yield from find("option", "run_together", f"program {name!r}")(facts.window)
    yield from ascending(facts.window)
    yield from dependencies(facts.window, _needs_of(facts.window))
    yield from gradients_used_up(facts.window)


def _needs_of(window: Window) -> Callable[[Key], list[Key]]:
    """Return a function: task → the tasks before it that make no buffer for it.

    Those that do make one are checked in ``flow``.
    """
    needs = needs_of(window.schedule)

    def unseen(key: Key) -> list[Key]:
        kind, _, stage = key
        gathers = [("gather", None, stage), ("add", None, stage)]
        norm = "norm", None, stage
        match kind:
            case "gather" | "part":
                return [("A", None, stage)]
            case "weights":
                return [("U", None, stage)]
            case "share":
                return []
            case "add":
                return needs(("A", None, stage))
            case "norm":
                every = range(window.schedule.microbatches)
                return [*((k, i, stage) for k in "BIW" for i in every), *gathers]
            case "C":
                return [norm]
            case "U":
                return [*needs(key), *gathers, norm]
        return [] if kind in BUILT_IN - {"A"} else needs(key)

    return unseen


def _kept(facts: Facts) -> Iterator[Fault]:
    """Check that a forward keeps what its backward or recompute needs, and no more."""
    window = facts.window
    for device, compute in enumerate(facts.compute):
        for position, x in compute:
            if not isinstance(x, ins.Forward):
                continue
            again = ("R", x.microbatch, x.stage) in window.spots
            keeps = window.trains and not again
            for wrong, what, cure in (
                (again and not x.again, "it keeps no buffers for its recompute", "write 'again'"),
                (
                    x.again and not again,
                    "it keeps buffers and is never recomputed",
                    "remove 'again'",
                ),
                (x.keeps and not keeps, "it keeps what no backward uses up", "remove 'keep'"),
                (keeps and not x.keeps, "it keeps nothing for its backward", "write 'keep'"),
            ):
                if wrong:
                    yield facts.fault(device, position, what, cure)


def _versions(facts: Facts) -> Iterator[Fault]:
    """Check which versions of the weights are read and made, and that they exist when read.

    All instructions of a micro-batch on a stage read version t − d in batch t, with the same d in
    all batches; a version before the first stands for the first. Instructions that run once a step
    read the oldest version that a micro-batch reads. The update of batch t makes version t + 1 of
    version t.
    """
    forwards: dict[tuple[int, int | None], int] = {}
    for compute in facts.compute:
        for _, x in compute:
            if isinstance(x, ins.Forward):
                forwards.setdefault((x.stage, x.microbatch), x.version)
                oldest = forwards.get((x.stage, None), x.version)
                forwards[x.stage, None] = min(oldest, x.version)
    for device, compute in enumerate(facts.compute):
        done: set[int] = set()
        for position, x in compute:
            if not isinstance(x, ins.Compute | ins.Run | ins.Update):
                continue
            here = -facts.moment(device, position)[0]
            wrong: ins.Wrong | None = None
            if isinstance(x, ins.Update):
                done.add(x.stage)
                if (x.reads, x.writes) != (0, 1):
                    wrong = (
                        f"it makes version {x.writes + here} of version {x.reads + here}",
                        f"write v{here} -> v{here + 1}: an update makes the next version of the "
                        "newest",
                    )
            else:
                right = forwards.get((x.stage, x.microbatch), x.version)
                why = "its forward read"
                if not facts.window.trains:
                    right, why = 0, "without a backward there is only"
                if device != facts.program.placement[x.stage]:
                    right, why = 0, "a copy has only"
                if isinstance(x, ins.Run):
                    right, why = 1 if x.stage in done else right, "its batch reads here"
                wrong = _unmade(facts, device, position, x)
                if x.version != right:
                    wrong = (
                        f"it reads version {x.version + here}, and {why} version {right + here}",
                        f"write v{right + here}",
                    )
            if wrong is not None:
                yield facts.fault(device, position, *wrong)


def _unmade(facts: Facts, device: int, position: int, x: ins.Compute | ins.Run) -> ins.Wrong | None:
    """What is wrong if an instruction reads a version that does not exist yet.

    Version t + v is made by the update of batch t + v − 1, in the step of that number minus the
    ``batch`` of the update. Where each replica updates a part, it exists once all parts are
    gathered. Without updates there is only version 0, the caller's.
    """
    steps, _ = facts.moment(device, position)
    newest = 0
    whole = facts.whole.get(x.stage)
    if whole is not None and whole.device == device:
        made, at = whole.moment
        # the newest v with (v - 1 + made, at) before this moment
        newest = steps - made + (at < position)
    if x.version <= newest:
        return None
    return (
        f"version {x.version - steps} does not exist here",
        f"read version {newest - steps}, or an older one, for all of its micro-batch",
    )


def _buckets(facts: Facts) -> Iterator[Fault]:
    """Check that what belongs together, as the parts of a backward, follows each other directly.

    So nothing adds to a bucket of gradients, or reads it, while it is being summed.
    """
    for device, compute in enumerate(facts.compute):
        latest: dict[object, ins.Instruction] = {}
        for position, x in compute:
            stage = getattr(x, "stage", None)
            if stage is not None:
                wrong = _out_of_row(latest.get(stage), x)
                latest[stage] = x
                if wrong is not None:
                    yield facts.fault(device, position, *wrong)


def _out_of_row(before: ins.Instruction | None, x: ins.Instruction) -> ins.Wrong | None:
    """What is wrong with an instruction, given the one before it of the same stage."""
    if before is not None and (cure := before.then(x)):
        return f"it comes right behind {print_instruction(before)}", cure
    return x.behind(before)


def _barriers(facts: Facts) -> Iterator[Fault]:
    """Check that a barrier separates all gradients from all updates, and that there is no other.

    With it, a failure before the first update leaves every weight as it was. Where batches overlap
    or read older versions there is none, and a failure ends the pipe.
    """
    steps = [x for compute in facts.compute for _, x in compute]
    delayed = any(isinstance(x, ins.Forward) and x.version < 0 for x in steps)
    overlaps = facts.program.depth > 0
    if not any(facts.meetings) and (overlaps or delayed):
        return
    for device, compute in enumerate(facts.compute):
        passed = False
        for position, x in compute:
            wrong: ins.Wrong | None = None
            match x:
                case ins.Barrier() | ins.Pause() if overlaps:
                    wrong = "batches overlap, and none may wait here", "remove it"
                case ins.Barrier() if not facts.updates:
                    wrong = "no update follows", "remove it"
                case ins.Barrier():
                    passed = True
                case ins.Update() if not passed and not overlaps:
                    wrong = "no barrier comes before it", "put one on every device"
                case _ if passed and x.before_barrier:
                    wrong = "it comes after a barrier", "move the barrier behind it"
            if wrong is not None:
                yield facts.fault(device, position, *wrong)


def _meetings(facts: Facts) -> Iterator[Fault]:
    """Check that all devices have the same barriers and pauses in the same order."""
    listed = [", ".join(type(x).__name__.lower() for _, x in met) for met in facts.meetings]
    usual = max(listed, key=listed.count, default="")
    for device, names in enumerate(listed):
        if names != usual:
            yield Fault(
                f"its barriers and pauses are [{names}], and those of other devices are [{usual}]",
                "give every device the same ones in the same order",
                device,
            )


_RULES: dict[str, tuple[Callable[[Facts], Iterator[Fault]], ...]] = {
    "lower": (_tasks, _kept, _versions, _buckets, _barriers, _meetings),
    "communicate": (flow.lives, flow.paired, flow.delivered, flow.paused),
}
"""Lowering pass → the rules that hold once it is done."""
