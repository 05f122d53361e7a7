"""Run lists that wait for each other, and find who waits in a circle when they get stuck."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fxpipe.errors import Fault


class Place(NamedTuple):
    """A position in a device's list."""

    device: int
    position: int


class Wait(NamedTuple):
    """A device cannot pass ``at`` before another device has passed ``on``."""

    at: Place
    on: Place


Waits = Sequence[Sequence[Wait]]
"""Device → its waits, by position; each for a place that exists, on another device."""


def deadlocks(waits: Waits) -> list[list[Wait]]:
    """Run all lists as far as they go; every circle of devices that wait for each other.

    Takes time in proportion to the number of waits, and to the logarithm of that of devices.
    """
    return _circles(_run(waits))


def deadlock_faults(waits: Waits, text: Callable[[Place], str], cure: str) -> Iterator[Fault]:
    """A fault for each device of each circle: where it waits, and for what on which device.

    Args:
        waits: who waits for whom.
        text: what stands at a place.
        cure: what to do about it.
    """
    for circle in deadlocks(waits):
        for at, on in circle:
            yield Fault(
                f"deadlock: it waits until device {on.device} is past position {on.position}, "
                f"{text(on)}, and that device is stuck in the same circle",
                cure,
                at.device,
                at.position,
                text(at),
            )


def _run(waits: Waits) -> dict[int, Wait]:
    """Device → the wait at which it is stuck, for those that do not finish."""
    done = [0] * len(waits)  # of each device's waits
    passed = [0.0] * len(waits)  # positions; right whenever a device is asleep or finished
    sleepers: list[list[tuple[int, int]]] = [[] for _ in waits]  # heaps: (position, who)
    ready = list(range(len(waits)))
    while ready:
        device = ready.pop()
        own = waits[device]
        while done[device] < len(own):
            at, on = own[done[device]]
            if passed[on.device] <= on.position:
                passed[device] = at.position
                heapq.heappush(sleepers[on.device], (on.position, device))
                break
            done[device] += 1
        else:
            passed[device] = float("inf")
        heap = sleepers[device]
        while heap and heap[0][0] < passed[device]:
            ready.append(heapq.heappop(heap)[1])
    return {
        device: own[done[device]] for device, own in enumerate(waits) if done[device] < len(own)
    }


def _circles(stuck: dict[int, Wait]) -> list[list[Wait]]:
    """The circles in a map where each device waits for one other."""
    circles: list[list[Wait]] = []
    seen: set[int] = set()
    for start in stuck:
        path: list[int] = []
        device = start
        while device not in seen:
            seen.add(device)
            path.append(device)
            device = stuck[device].on.device
        if device in path:
            circles.append([stuck[member] for member in path[path.index(device) :]])
    return circles
