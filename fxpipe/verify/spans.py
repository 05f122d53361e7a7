"""Numbers: runs of them in few words, for messages, and those that no pipeline means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxpipe.errors import Fault
from fxpipe.ir.unroll import FURTHEST

_MISSING = 10_000
"""How many forwards may be missing and still be told one by one."""


def counts_faults(stages: int, microbatches: int, held: int, reach: int) -> Iterator[Fault]:
    """Counts that one line can ask for, and over which all that follows would take for ever.

    Args:
        stages: how many there are.
        microbatches: how many there are a batch.
        held: how many tasks, or instructions, there are for them.
        reach: by how many batches anything lies back.
    """
    if stages * microbatches > held + _MISSING:
        yield Fault(
            f"its {microbatches} micro-batches have at least {stages * microbatches} forwards on "
            f"{stages} stages, and it holds {held} tasks",
            f"write them all (at most {_MISSING} may be missing for each to be named), or take "
            "fewer micro-batches",
        )
    if reach > FURTHEST:
        yield Fault(
            f"it reaches {reach} batches back", f"let delays and tasks reach at most {FURTHEST}"
        )


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers in short: ``0, 2-5 and 9``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    words = ["-".join(map(str, run)) for run in runs]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def microbatches(numbers: Iterable[int]) -> str:
    """``micro-batch 3`` or ``micro-batches 0 and 2-5``."""
    listed = list(numbers)
    return f"micro-batch{'' if len(listed) == 1 else 'es'} {spans(listed)}"
