"""A lower bound on the slowest stage that memory limits set.

The first k stages together can keep no more than all of their memory, so that they do no more than
the most work that fits in there; the other stages must do the rest. The same holds from the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fxpipe.passes.partition.solver.blocks import alone, latest_sources, trees
from fxpipe.passes.partition.work import Machine, Work


def memory_bound(work: Work, machine: Machine) -> float:
    """Seconds that some stage takes at least, if all keep their limits; infinite if none can.

    What may be chosen is eased in three ways: an atom stands behind one other alone, the last that
    it reads (from the end, before the first that reads it); it may be taken in part; and what
    stages receive, and keep to undo an update, takes no memory.
    """
    if not machine.limited:
        return 0.0
    count = len(work)
    readers = (work.after[atom] for atom in reversed(range(count)))
    sides = (
        (False, latest_sources(work)),
        (True, [count - 1 - atoms[0] if atoms else None for atoms in readers]),
    )
    bound = 0.0
    for saving, rooms in _eased(machine):
        for backward, parents in sides:
            blocks = alone(work, saving)
            speeds = machine.speeds
            if backward:
                blocks, rooms, speeds = blocks[::-1], rooms[::-1], speeds[::-1]
            roots = [block for block in trees(blocks, parents) if block.part_of is None]
            steps = sorted(((b.density, b.kept) for b in roots), reverse=True)
            bound = max(bound, _bound(steps, rooms, speeds, work.total))
    return bound


def _eased(machine: Machine) -> Iterator[tuple[float, Sequence[float]]]:
    """How often every stage keeps what is saved, at least, with stage → the memory that it has.

    With as many as the stage that keeps the fewest micro-batches; or else with the memory of all
    as if they kept as many as the one that keeps the most, where parameters count the less.
    """
    peaks = [saving for saving, _ in machine.held]
    yield min(peaks), machine.rooms
    if min(peaks) < max(peaks) and min(peaks) > 0:
        most = max(peaks)
        yield most, [room * most / own for room, own in zip(machine.rooms, peaks, strict=True)]


def _bound(
    steps: Sequence[tuple[float, float]],
    rooms: Sequence[float],
    speeds: Sequence[float],
    total: float,
) -> float:
    """The bound from one side.

    Args:
        steps: seconds a byte, and bytes, of what fills the memory, the densest first.
        rooms: stage → bytes.
        speeds: stage → how fast it is.
        total: seconds of all work.
    """
    done, bound, position, left = 0.0, 0.0, 0, steps[0][1] if steps else 0.0
    for stage, room in enumerate(rooms):
        while room > 0 and position < len(steps):
            density, taken = steps[position][0], min(room, left)
            done += density * taken
            room -= taken
            left -= taken
            if left <= 0:
                position += 1
                left = steps[position][1] if position < len(steps) else 0.0
        rest, others = total - done, sum(speeds[stage + 1 :])
        if rest > 1e-9 * total:
            bound = max(bound, rest / others if others else math.inf)
    return bound
