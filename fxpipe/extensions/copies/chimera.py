"""Chimera: two opposite pipelines on the same devices (Li & Hoefler, arXiv 2107.06925).

From the paper: the two opposite placements, 1F1B with half of the micro-batches in each, that both
fit together without a conflict for an even p, the bubble, and what is kept at the ends and in the
middle. Derived here: the start times, that units of p micro-batches follow each other without a
gap, that directions alternate so that any m works, and what is kept in between.

One thing differs: in the paper both devices of a stage hold and update its weights. Here one of
them does, and sends the weights to its copy at the beginning of each step. That moves as many bytes
as if both summed the gradients, and needs one optimizer state and one update.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule
from fxpipe.ir.task import A, B, F, Task, U


def both_ways(devices: int) -> tuple[tuple[int, ...], ...]:
    """Stage s on device s, with a copy on device p − 1 − s unless that is the same device."""
    return tuple(tuple({stage: 0, devices - 1 - stage: 0}) for stage in range(devices))


@schedule("chimera", placement=both_ways)
def chimera(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """Two 1F1B pipelines at once: even micro-batches go down the devices, odd ones up.

    Less than half of 1F1B's bubble, which matters with few micro-batches, for twice the weights: a
    device holds a stage of its own and a copy of another. Made for an even p and an m that p
    divides, the paper's unit. Every p and m works, but with an odd p both pipelines share the
    device in the middle.

    Counted in tasks, the two micro-batches of a pair begin together, pairs begin 2 apart, and units
    of p micro-batches 2p apart. A micro-batch reaches stage s after s tasks and comes back to it
    after 2p − 1 − s, so on a device those that go down alternate with those that go up.

    p = 4, m = 4, a backward drawn as long as a forward; small letters on the stage that is a copy::

        0: F0 F2  . f1 b1 f3 b3 B0  . B2 U
        1:  . F0 f1 F2 f3 b1 B0 b3 B2  . U
        2:  . f1 F0 f3 F2 B0 b1 B2 b3  . U
        3: f1 f3  . F0 B0 F2 B2 b1  . b3 U

    A device begins to sum a stage's gradients (A, not drawn) right after its last backward there.

    Bubble: (p − 2)/(2m + p − 2), for T_F = T_B, even p, and an m that p divides. Kept: a device at
    distance e from the nearer end keeps min(p/2 + 1 + e, p) micro-batches of a stage, for even p
    and m ≥ p. ``fxpipe.schedules`` explains the symbols.
    """
    times: list[tuple[int, Task]] = []
    for i in range(microbatches):
        unit, place = divmod(i, devices)
        stage = devices - 1 - device if i % 2 else device
        begin = 2 * devices * unit + place - i % 2
        times.append((begin + stage, F(i, stage)))
        times.append((begin + 2 * devices - 1 - stage, B(i, stage)))
    tasks = [task for _, task in sorted(times, key=lambda entry: entry[0])]
    last = {task.stage: task for task in tasks}
    for task in tasks:
        yield task
        if last[task.stage] is task:
            yield A(task.stage)
    yield U(device)
