"""Rules for copies: stages that other devices than their own compute, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fxpipe.errors import Fault
from fxpipe.ir.instruction import Wrong
from fxpipe.ir.schedule import Schedule

if TYPE_CHECKING:
    from fxpipe.verify.tasks import Window


def copies_faults(
    placement: Sequence[int], copies: Sequence[Sequence[int]], devices: int
) -> Iterator[Fault]:
    """Check that each copy of a stage is on a device of its own."""
    if len(copies) != len(placement):
        yield Fault(
            f"it has the copies of {len(copies)} stages, and {len(placement)} stages",
            "give those of each stage, or () for one without copies",
        )
        return
    for stage, (home, others) in enumerate(zip(placement, copies, strict=False)):
        for number, device in enumerate(others):
            if not 0 <= device < devices:
                yield Fault(
                    f"a copy of stage {stage} is placed on device {device}",
                    f"place it on one of the {devices} devices, numbered from 0",
                )
            elif device == home or device in others[:number]:
                yield Fault(
                    f"stage {stage} is on device {device} already",
                    "place each of its copies on a device of its own",
                )


def run_together(window: Window) -> Iterator[Fault]:
    """Check that one device runs all tasks of a micro-batch on a stage.

    It is the stage's own device or that of a copy; for a task that a user has defined, its own.
    """
    schedule = window.schedule
    for (kind, i, stage), spot in window.spots.items():
        if i is None or kind == "A" or ("F", i, stage) not in window.spots:
            continue
        device, task_kind = schedule.device_of(stage, i), window.kinds.get(kind)
        if task_kind is not None and task_kind.run is not None:
            wrong = _away(schedule, stage, i)
            if wrong is not None and spot.device == schedule.placement[stage]:
                yield window.fault(spot, *wrong)
        elif spot.device != device and spot.device in schedule.devices_of(stage):
            what = f"the forward of micro-batch {i} on stage {stage} is on device {device}"
            yield window.fault(spot, what, "move it there, or the forward here")


def not_on_copies(schedule: Schedule, stage: int, microbatch: int | None, copy: int) -> Wrong:
    """What is wrong with a task on a copy that is none for copies."""
    home = schedule.placement[stage]
    return _away(schedule, stage, microbatch) or (
        f"device {copy} has a copy of stage {stage}, which computes micro-batches and sums their "
        f"gradients; its weights are on device {home}",
        "move it there",
    )


def _away(schedule: Schedule, stage: int, microbatch: int | None) -> Wrong | None:
    """What is wrong with a user's task if a copy computes its micro-batch."""
    home = schedule.placement[stage]
    device = home if microbatch is None else schedule.device_of(stage, microbatch)
    if device == home:
        return None
    return (
        f"it needs the weights of stage {stage}, on device {home}, and a copy on device "
        f"{device} computes the forward of micro-batch {microbatch}",
        f"move that forward to device {home} as well, or define a task that comes once a step",
    )
