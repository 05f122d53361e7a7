"""List scheduling: when each item of some ordered rows starts, if none starts before it can."""

from __future__ import annotations

from collections.abc import Sequence

Place = tuple[int, int]
"""A row and a position in it."""

NOWHERE: Place = (-1, -1)
"""The place of an item that no row holds: who needs it waits for ever."""


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
