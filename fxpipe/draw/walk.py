"""List scheduling: when each item of some ordered rows starts, if none starts before it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

T = TypeVar("T")

Place = tuple[int, int]
"""A row and a position in it."""

NOWHERE: Place = (-1, -1)
"""The place of an item that no row holds: who needs it waits for ever."""


@dataclass(frozen=True, slots=True)
class Span(Generic[T]):
    """A task on a device from its start to its end.

    Attributes:
        device: the device.
        position: the task's index in the device's row.
        start: when it starts.
        end: when it ends.
        task: the task.
    """

    device: int
    position: int
    start: float
    end: float
    task: T


@dataclass(frozen=True)
class Walked(Generic[T]):
    """All that ran, and where the devices are stuck.

    Attributes:
        devices: how many there are.
        spans: what ran, device by device in its order.
        unrun: what never ran, device by device, one behind the other from when the device waits.
    """

    devices: int
    spans: tuple[Span[T], ...]
    unrun: tuple[Span[T], ...]

    @cached_property
    def stuck(self) -> tuple[Span[T], ...]:
        """The task at which each stuck device waits for ever."""
        first: dict[int, Span[T]] = {}
        for span in self.unrun:
            first.setdefault(span.device, span)
        return tuple(first.values())


def walk_rows(
    rows: Sequence[Sequence[T]],
    cost: Callable[[T], float],
    needs: Sequence[Sequence[Sequence[Place]]],
) -> Walked[T]:
    """Run rows of tasks on paper, as ``start_times`` does."""
    costs = [[cost(task) for task in row] for row in rows]
    starts = start_times(costs, needs)
    spans: list[Span[T]] = []
    unrun: list[Span[T]] = []
    for device, row in enumerate(rows):
        free = 0.0
        for position, task in enumerate(row):
            ran = position < len(starts[device])
            start = starts[device][position] if ran else free
            free = start + costs[device][position]
            (spans if ran else unrun).append(Span(device, position, start, free, task))
    return Walked(len(rows), tuple(spans), tuple(unrun))


def start_times(
    costs: Sequence[Sequence[float]], needs: Sequence[Sequence[Sequence[Place]]]
) -> list[list[float]]:
    """Run all rows at once, each in its order, and return when their items start.

    An item starts as soon as the item before it in its row is done and all that it needs are.

    Args:
        costs: row → how long each of its items takes.
        needs: row → for each of its items, the places of the items that it waits for.

    Returns:
        Row → the starts of the items that ran. A row shorter than its costs is stuck at the
        first item that is missing.
    """
    starts: list[list[float]] = [[] for _ in costs]
    ends: dict[Place, float] = {}
    waiting: dict[Place, list[int]] = {}
    runnable = list(range(len(costs)))
    while runnable:
        row = runnable.pop()
        free = ends.get((row, len(starts[row]) - 1), 0.0)
        for position in range(len(starts[row]), len(costs[row])):
            needed = needs[row][position]
            missing = next((place for place in needed if place not in ends), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(row)
                break
            start = max([free, *(ends[place] for place in needed)])
            free = start + costs[row][position]
            starts[row].append(start)
            ends[row, position] = free
            runnable += waiting.pop((row, position), ())
    return starts
