"""Chimera: two pipelines in opposite directions on the same devices (arXiv 2107.06925).

For: fewer bubbles than 1F1B where micro-batches are few, for a second copy of the weights.
Bubble: (p − 2)/(2m + p − 2) for T_F = T_B, an even p, and m a multiple of p. Stash: p/2 + 1 + e
micro-batches, at most p, on a device that is e away from the nearer end, for m ≥ p. Weights: each
device has two stages, one of them a copy. Made for an even p, and for m a multiple of it, the
paper's unit; any will do, but with an odd p both pipelines share the device in the middle.

Read: that stages lie in one order for the first pipeline and in the opposite order for the second,
that half of the micro-batches go through each by 1F1B, that for an even p both then fit into each
other without a conflict, and the bubble and the stash at the ends and in the middle. Derived: the
times below, that units in a row leave no gap between them, that micro-batches alternate so that any
m will do, and the stash in between. Here one device of each stage has its weights and updates
them, where the paper's both do: it gives them to its copy at the begin of each step. That is as
many bytes as if both summed the gradients, one state of the optimizer, and one update.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.recipe import schedule
from fxpipe.ir.task import A, B, F, Task, U


def both_ways(devices: int) -> tuple[tuple[int, ...], ...]:
    """Stage s on device s, and a copy of it on device p − 1 − s, where that is another one."""
    return tuple(tuple({stage: 0, devices - 1 - stage: 0}) for stage in range(devices))


@schedule("chimera", placement=both_ways)
def chimera(device: int, devices: int, microbatches: int) -> Iterator[Task]:
    """Micro-batches 0, 2, … go down the devices, and 1, 3, … up.

    Both of a pair begin at the same time, pairs 2 tasks one after another, and each unit of p
    micro-batches 2 p after the one before. A micro-batch reaches stage s after s tasks, and comes
    back to it after 2 p − 1 − s. So what goes down and what goes up meets a device in turn.

    p = 4, m = 4, a backward drawn as long as a forward; small letters on the stage that is a copy::

        0: F0 F2  . f1 b1 f3 b3 B0  . B2 U
        1:  . F0 f1 F2 f3 b1 B0 b3 B2  . U
        2:  . f1 F0 f3 F2 B0 b1 B2 b3  . U
        3: f1 f3  . F0 B0 F2 B2 b1  . b3 U

    Each device begins to sum a stage's gradients right after its last backward of it.
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
