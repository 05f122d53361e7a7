"""Runs of numbers in few words, for messages."""

from __future__ import annotations

from collections.abc import Iterable


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
