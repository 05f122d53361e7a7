"""Write a device's row as a string of words, as a figure shows it from left to right."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from fxpipe.ir.task import Task


def spell(words: str, stages: tuple[int, ...], microbatches: int) -> Iterator[Task]:
    """Yield the tasks that the words stand for.

    A word is the letter of a task and the position of its stage in ``stages``: "F0" is the forward
    of the next micro-batch on the device's first stage, "B1" or "I1" the next backward on its
    second. "W" is the weight gradient that has waited longest.

    Micro-batches from ``microbatches`` on are left out, so that a row written for many also serves
    for few: an order stays valid when a micro-batch is removed from all devices.
    """
    forwards: Counter[int] = Counter()
    backwards: Counter[int] = Counter()
    waiting: deque[tuple[int, int]] = deque()
    for word in words.split():
        if word == "W":
            i, stage = waiting.popleft()
        else:
            taken = forwards if word[0] == "F" else backwards
            stage = stages[int(word[1:])]
            i, taken[stage] = taken[stage], taken[stage] + 1
        if word[0] == "I":
            waiting.append((i, stage))
        if i < microbatches:
            yield Task(word[0], i, stage)
