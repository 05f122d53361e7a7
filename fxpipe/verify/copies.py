"""Rules for stages that several devices compute: a stage of its own device, and its copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxpipe.errors import Fault
from fxpipe.verify.tasks import Window


def copies_faults(
    placement: Sequence[int], copies: Sequence[Sequence[int]], devices: int
) -> Iterator[Fault]:
    """Copies are on other devices than their stage, each on its own."""
    if copies and len(copies) != len(placement):
        yield Fault(
            f"it has the copies of {len(copies)} stages, and {len(placement)} stages",
            "give those of each stage, or () for one without copies",
        )
        return
    for stage, (home, own) in enumerate(zip(placement, copies, strict=False)):
        for number, device in enumerate(own):
            if not 0 <= device < devices:
                yield Fault(
                    f"a copy of stage {stage} is placed on device {device}",
                    f"place it on one of the {devices} devices, numbered from 0",
                )
            elif device == home or device in own[:number]:
                yield Fault(
                    f"stage {stage} is on device {device} already",
                    "place each of its copies on a device of its own",
                )


def together(window: Window) -> Iterator[Fault]:
    """All tasks of a micro-batch on a stage are on one device, its own or that of a copy."""
    schedule = window.schedule
    for (kind, i, stage), spot in window.spots.items() if schedule.copies else ():
        if i is None or kind == "A" or ("F", i, stage) not in window.spots:
            continue
        device = schedule.device_of(stage, i)
        if spot.device != device and spot.device in schedule.devices_of(stage):
            what = f"the forward of micro-batch {i} on stage {stage} is on device {device}"
            yield window.fault(spot, what, "move it there, or the forward here")
