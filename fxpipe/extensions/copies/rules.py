"""Rules for copies: stages that other devices than their own compute, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fxpipe.errors import Fault

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
    """Check that one device runs all tasks of a micro-batch on a stage: the stage's own device or
    that of a copy. Tasks of a user's own are for whole steps, on the stage's own device. Each copy
    gives its gradients, and in a program the stage's own device adds them."""
    schedule = window.schedule
    lowered = "add" in window.kinds
    gives = window.trains if lowered else any(kind == "A" for kind, _, _ in window.spots)
    for stage, copies in enumerate(schedule.working if gives else ()):
        if copies and lowered and ("add", None, stage) not in window.spots:
            add, home = window.kinds["add"], schedule.placement[stage]
            yield Fault(f"stage {stage} has no {add.name}", add.lacking, home)
        for copy in copies:
            if ("A", copy, stage) not in window.spots:
                what = f"its copy of stage {stage} has no {window.kinds['A'].name}"
                yield Fault(what, "let it give its gradients behind its last backward", copy)
    for (kind, i, stage), spot in window.spots.items():
        if i is None or kind == "A" or ("F", i, stage) not in window.spots:
            continue
        task_kind = window.kinds.get(kind)
        if task_kind is not None and task_kind.make is not None:
            if schedule.devices_of(stage)[1:]:
                what = f"it needs the weights of stage {stage}, whose copies have none of their own"
                yield window.fault(spot, what, "define a task that comes once a step")
        elif spot.device != (device := schedule.device_of(stage, i)):
            if spot.device in schedule.devices_of(stage):
                what = f"the forward of micro-batch {i} on stage {stage} is on device {device}"
                yield window.fault(spot, what, "move it there, or the forward here")
