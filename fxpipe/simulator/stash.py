"""What stages keep, counted: micro-batches for their backward, and versions of their weights."""

from __future__ import annotations

from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program

_READERS = (ins.Forward, ins.Recompute, ins.Backward, ins.InputGrad, ins.WeightGrad, ins.Run)


def peak_stash(program: Program) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The most micro-batches that are kept at once: stage → its own, device → all together.

    One is kept from its forward, or its recompute, to the end of its backward, of both halves
    where that is parted.
    """
    stages, devices = [0] * program.stages, [0] * program.devices
    for device, list_ in enumerate(program.lists):
        kept = [0] * program.stages
        for instruction in list_:
            match instruction:
                case ins.Forward(stage, keeps=True) | ins.Recompute(stage):
                    kept[stage] += 1
                    stages[stage] = max(stages[stage], kept[stage])
                    devices[device] = max(devices[device], sum(kept))
                case ins.Backward(stage) | ins.WeightGrad(stage):
                    kept[stage] -= 1
    return tuple(stages), tuple(devices)


def peak_versions(program: Program) -> tuple[int, ...]:
    """Stage → the most versions of its weights that are needed at once, from its updates on."""
    most = [1] * program.stages
    for list_ in program.lists:
        for _, stage, live in live_versions(list_):
            most[stage] = max(most[stage], live)
    return tuple(most)


def live_versions(list_: tuple[ins.Instruction, ...]) -> list[tuple[int, int, int]]:
    """After each update of a device: its position, its stage, and the versions that are needed.

    These are the newest one, and the older ones that something reads later. Versions count from
    the first step; one before it is the first.
    """
    last_read: dict[tuple[int, int], int] = {}
    for position, instruction in enumerate(list_):
        if isinstance(instruction, _READERS):
            last_read[instruction.stage, max(instruction.version, 0)] = position
    found = []
    existing: dict[int, list[int]] = {}
    for position, instruction in enumerate(list_):
        if isinstance(instruction, ins.Update):
            stage = instruction.stage
            older = existing.setdefault(stage, [0])
            older[:] = [v for v in older if last_read.get((stage, v), -1) > position]
            found.append((position, stage, len(older) + 1))
            older.append(max(instruction.writes, 0))
    return found
