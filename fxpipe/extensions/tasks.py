"""The times of tasks in steps that were measured, or simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from fxpipe.ir import instruction as ins

Tasks = Mapping[tuple[str, int], Sequence[float]]
"""Letter and stage → the seconds of each of these tasks."""


def tasks_of(timed: Iterable[tuple[ins.Instruction, float]]) -> Tasks:
    """The times of the tasks that instructions run, of one device after another."""
    tasks: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    part = 0.0
    for instruction, seconds in timed:
        if instruction.letter is None:
            continue
        part += seconds
        if not instruction.partial:  # else its rest comes next
            stage: int = instruction.stage
            tasks[instruction.letter, stage].append(part)
            part = 0.0
    return tasks
