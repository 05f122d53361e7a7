"""The verifier of a Program: that it runs to its end and computes what its schedule says."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from numbers import Integral

from fxpipe.errors import Fault, InputError, VerificationError
from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.parts import Parts
from fxpipe.torchtools.state import without_collection
from fxpipe.verify.alone import opcodes_of
from fxpipe.verify.channels import Transfers
from fxpipe.verify.plan import edge_faults
from fxpipe.verify.run import AbstractRun, missing
from fxpipe.verify.tasks import ascending, complete, counts_faults


@without_collection()
def verify_program(program: Program, channel: int | None = None) -> Program:
    """Return the program, or raise VerificationError with every fault.

    The time is proportional to the number of instructions.

    Args:
        program: the program.
        channel: how many values may be in flight between two devices, as in ``Transfers.stuck``.

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
    ran = AbstractRun(program)
    faults = [ran.fault(*place, *wrong) for place, wrong in ran.wrong.items()]
    if "lower" in program.passes:
        window = ran.window
        tasks = {kind for kind, _, _ in window.spots}
        everywhere = [x for x in opcodes_of(program) if x.of_every_stage(program, tasks)]
        kinds = [x.stands_for.letter if x.stands_for else x.task for x in everywhere]
        faults.extend(complete(window, [kind for kind in kinds if kind is not None]))
        if program.copies:
            together = Parts.run_together.find(f"program {program.name!r}")
            faults.extend(together(window))
        faults.extend(ascending(window))
        if Parts.misused.there and not program.opcodes <= ins.OPCODES.keys():
            misused = Parts.misused.find()(ran)
            faults.extend(ran.fault(*place, *wrong) for place, wrong in misused)
    faults.extend(ran.faults())
    if "lower" in program.passes:
        faults.extend(_meetings(program))
    if "communicate" in program.passes:
        transfers = Transfers(ran)
        faults.extend([*transfers.paired(), *missing(ran), *transfers.stuck(channel)])
    if program.launches and not faults and Parts.unordered.there:
        faults.extend(Parts.unordered.find()(program))
    return faults


def smallest_channel(program: Program) -> int:
    """The fewest values that each channel must hold so that no device gets stuck.

    Raises:
        VerificationError: the program is wrong, or gets stuck on channels of any size.
    """
    verify_program(program)
    transfers = Transfers(AbstractRun(program))
    most = 1
    while any(transfers.stuck(most)):
        most *= 2
    # more room is never worse: a send then waits for an earlier receive
    return bisect(range(most), False, key=lambda channel: not any(transfers.stuck(channel)))


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
        misplaced = Parts.copies_faults.find(f"program {program.name!r}")
        yield from misplaced(program.placement, program.copies, program.devices)
        if program.replicas > 1 or program.depth:
            what = "it has copies of stages, and several replicas or batches that overlap"
            yield Fault(what, "give it one replica and a flush, or no copies")
    yield from edge_faults((*program.edges, *program.gradients), program.stages)


def _counts(lists: Sequence[Sequence[object]]) -> str:
    return ", ".join(str(len(instructions)) for instructions in lists) or "no"


def _meetings(program: Program) -> Iterator[Fault]:
    """Check that all devices have the same barriers and pauses in the same order."""
    listed = [
        ", ".join(x.opcode for x in row if isinstance(x, ins.Meeting)) for row in program.lists
    ]
    usual = max(listed, key=listed.count, default="")
    for device, names in enumerate(listed):
        if names != usual:
            yield Fault(
                f"its barriers and pauses are [{names}], and those of other devices are [{usual}]",
                "give every device the same ones in the same order",
                device,
            )
