"""``schedule_csv``: the CSV of torch.distributed.pipelining, a row per rank:

0F0,0F1,0B0,0B1
1F0,1F1,1B0,1B1
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.errors import InputError
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS


def schedule_csv(schedule: Schedule) -> str:
    """The CSV that torch.distributed.pipelining reads as "compute_only".

    Its lowering adds the sums over replicas behind a stage's last backward. Updates are left out:
    with torch they are in the loop around ``step``.

    Raises:
        VerificationError: something is wrong with the schedule.
        InputError: torch's runtime cannot run the schedule; the message names every reason.
    """
    schedule.verify()
    if reasons := list(_inexpressible(schedule)):
        raise InputError(
            f"schedule {schedule.name!r} cannot be written as the CSV of "
            f"torch.distributed.pipelining: {'; '.join(reasons)}"
        )
    return "".join(",".join(_cells(schedule, d)) + "\n" for d in range(schedule.devices))


def _cells(schedule: Schedule, device: int) -> Iterator[str]:
    """The actions of a device's tasks; of a pair with a half of a backward two, as torch has none
    for both."""
    for unit in schedule.units(device):
        actions = [f"{t.stage}{t.kind}{t.microbatch}" for t in unit if t.kind not in "UA"]
        if len(unit) > 1 and unit[-1].kind == "B":
            yield f"({';'.join(actions)})OVERLAP_F_B"
        else:
            yield from actions


def _inexpressible(schedule: Schedule) -> Iterator[str]:
    if schedule.overlaps:
        yield (
            "the runtime has no weight versions, and its batches never overlap: take a schedule "
            "that ends with a flush and has delay=0, such as 1f1b"
        )
    if not schedule.trains:
        yield (
            "the loader refuses forwards alone: write a schedule that trains, such as gpipe, and "
            "call eval() there"
        )
    if schedule.copies:
        yield (
            "it has each stage on one rank: take a schedule without copies, or, for replicas of a "
            "whole pipeline, torch's own data parallelism around one such as 1f1b"
        )
    for letter in sorted(schedule.kinds):
        kind = KINDS[letter]
        if letter == "R":
            yield "it has no recompute: leave R out, and let stages call torch.utils.checkpoint"
        elif letter == "O":
            yield "it offloads nothing: leave O and P out"
        elif letter == "C":
            yield "it has no clip: leave C out, and clip behind step() in the loop"
        elif kind.run is not None:
            yield f"it has no task {kind.name!r}: leave {letter} out, and call it behind step()"
    for device in range(schedule.devices):
        if not schedule.held_by(device):
            yield f"device {device} holds no stage, and each rank needs one: leave it out"
