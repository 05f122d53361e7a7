"""How evenly the stages share the work, and what to do if they do not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxpipe.passes.partition.options import Partition

HEAVY = 1.2
"""A stage that takes this many times the mean is worth a remark: without it, a step with many
micro-batches would be a sixth shorter."""

_WORTH = 1e-3
"""Seconds that the slowest stage takes for a micro-batch, at least, before anybody is warned: a
shorter one is a toy, and measured too coarsely."""


def ratio(seconds: Sequence[float]) -> float:
    """How many times the mean the slowest stage takes; 1 for stages that take no time."""
    return max(seconds) * len(seconds) / sum(seconds) if sum(seconds) else 1.0


def unbalanced(seconds: Sequence[float], partition: Partition) -> str | None:
    """Say that a stage is much slower than the others, and the line to write; None if none is.

    Args:
        seconds: stage → seconds for a micro-batch, forward and backward.
        partition: what the user asked of the cut.
    """
    if ratio(seconds) <= HEAVY or max(seconds) < _WORTH:
        return None
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    share = seconds[slowest] / sum(seconds)
    return (
        f"stage {slowest} takes {ratio(seconds):.2f} times the mean of the {len(seconds)} stages "
        f"({share:.0%} of the work), and the others wait for it: "
        f"{_cure(seconds, partition)}; docs/training.md says more under "
        '"My pipe is unbalanced"'
    )


def _cure(seconds: Sequence[float], partition: Partition) -> str:
    if partition.at is not None:
        return "leave out partition= (at=), and the stages are balanced, or begin others there"
    cure = "partition=[...] with the modules at which stages begin may divide it better"
    enough = math.ceil(sum(seconds) / max(seconds))
    if enough < len(seconds):
        cure += f"; else {enough} stages would be about as fast (devices={enough})"
    return cure
