"""List scheduling: a schedule from a placement, an order of urgency and limits of memory.

All devices are followed through time. Whenever a device is idle, it starts the most urgent of the
tasks whose inputs are there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from heapq import heappop, heappush
from itertools import product
from numbers import Integral, Real
from typing import Any, Protocol

from fxpipe.errors import InputError
from fxpipe.ir.recipe import EdgesRule, Placement, Recipe, enter, one_each
from fxpipe.ir.schedule import Edges, Schedule
from fxpipe.ir.task import KINDS, Task, U
from fxpipe.ir.walk import needs_of

Urgency = Callable[[Task, int], Any]
"""The function that an author writes: ``(task, devices)`` → what sorts the task among others; the
least is the most urgent. The task has its stage and its micro-batch."""

Limit = int | Callable[[int, int], int] | None
"""How many micro-batches a device keeps at most: a number, or a function of the device and the
number of devices, or None for any number."""


Memory = float | Callable[[int, int], float] | None
"""The same in bytes."""


class KeptBytes(Protocol):
    """The bytes that stages keep of a micro-batch, such as ``Sizes`` of the simulator.

    Attributes:
        saved: stage → bytes from its forward on; those that are not named keep nothing.
        deferred: stage → bytes from its input gradient to its weight gradient.
    """

    @property
    def saved(self) -> Mapping[int, float]: ...

    @property
    def deferred(self) -> Mapping[int, float]: ...


def list_schedule(
    name: str,
    kinds: str,
    *,
    placement: Placement = one_each,
    slices: int = 1,
    limit: Limit = None,
    memory: Memory = None,
    sizes: KeptBytes | None = None,
    costs: Mapping[Any, float] | None = None,
    edges: EdgesRule = None,
) -> Callable[[Urgency], Recipe]:
    """Decorator: register a schedule that is made by list scheduling as the recipe ``name``.

    Whenever a device is idle, it starts the task that sorts first of those that can start. A
    forward can start if it and all forwards of its device that sort before it fit under the limits:
    a forward overtakes others only where they keep their room. Each row ends with the updates of
    its stages.

    Args:
        name: the name that ``fxpipe.compile(schedule=...)`` takes.
        kinds: the letters of the tasks that a micro-batch has on each stage, such as "FB", "FIW" or
            "FRB", perhaps with a task of your own.
        placement: number of devices → the device of each stage.
        slices: the parts of each micro-batch's sequence; the placement then gives the stages of
            one slice after the other, such as ``round_robin(slices)``. See Schedule.
        limit: how many micro-batches a device keeps at most, each counted on every stage from its
            forward to the end of its backward or weight gradient.
        memory: how many bytes a device keeps at most of its micro-batches: a number, or a function
            of the device and the number of devices. Both limits may be given.
        sizes: with ``memory``, the bytes that stages keep of a micro-batch, as ``search_schedule``
            takes them. Only ``saved`` and ``deferred`` count. A whole backward releases ``saved``.
            With halves a forward takes the greater of the two; its input gradient leaves
            ``deferred``, and its weight gradient nothing.
        costs: kind, or kind and stage → the time to reckon with; by default the default times.
        edges: which stages feed which, by default each the next; see ``fxpipe.schedule``.

    Raises:
        InputError: ``kinds`` has no forward, or a letter that is no kind of task of a micro-batch;
            or a time is negative; or one of ``memory`` and ``sizes`` is missing; or the name is
            that of a schedule of the library. When a schedule is made: a stage has copies, stages
            cannot be divided into slices, or the devices wait for one another, for a limit is too
            small for this order.
    """
    for kind in kinds:
        if kind not in KINDS or not KINDS[kind].per_microbatch:
            raise InputError(
                f"schedule {name!r}: {kind!r} is no task of a micro-batch; give letters such as "
                "'FB' or 'FIW'"
            )
    if "F" not in kinds:
        raise InputError(f"schedule {name!r}: its kinds are {kinds!r}; give a forward, F, too")
    for what, time in (costs or {}).items():
        if not isinstance(time, Real) or not 0 <= time < float("inf"):
            raise InputError(
                f"schedule {name!r}: the time of {what!r} is {time!r}; give one of at least 0"
            )

    if (memory is None) != (sizes is None):
        raise InputError(
            f"schedule {name!r}: memory is {memory!r} and sizes is {sizes!r}; a limit in bytes "
            "takes both, such as memory=8e9, sizes=Sizes(saved={0: 1e9})"
        )
    if not (memory is None or callable(memory) or isinstance(memory, Real)):
        raise InputError(
            f"schedule {name!r}: memory is {memory!r}; give bytes, or a function of the device and "
            "the number of devices"
        )
    if not isinstance(slices, Integral) or slices < 1:
        raise InputError(f"schedule {name!r}: slices is {slices!r}; give a whole number above 0")
    bytes_of = None if memory is None or sizes is None else (memory, sizes)

    def register(urgency: Urgency) -> Recipe:
        # a recipe asks for one device after the other
        rows = lru_cache(maxsize=1)(
            partial(_rows, name, kinds, urgency, slices, limit, bytes_of, costs)
        )

        def tasks(
            device: int,
            devices: int,
            microbatches: int,
            *,
            stages: tuple[int, ...],
            placement: tuple[int, ...],
            edges: Edges | None,
        ) -> Iterator[Task]:
            if any(placement[stage] != device for stage in stages):
                raise InputError(f"schedule {name!r}: list scheduling takes no copies of stages")
            yield from rows(devices, microbatches, placement, edges)[device]
            if kinds != "F":
                yield from map(U, stages)

        tasks.__doc__, tasks.__module__ = urgency.__doc__, urgency.__module__
        return enter(Recipe(name, tasks, placement=placement, slices=slices, edges=edges))

    return register


def _rows(
    name: str,
    kinds: str,
    urgency: Urgency,
    slices: int,
    limit: Limit,
    bytes_of: tuple[float | Callable[[int, int], float], KeptBytes] | None,
    costs: Mapping[Any, float] | None,
    devices: int,
    microbatches: int,
    placement: tuple[int, ...],
    edges: Edges | None,
) -> list[list[Task]]:
    """Device → its tasks in the order in which they start, without updates."""
    costs = {**{kind: KINDS[kind].cost for kind in kinds}, **(costs or {})}
    frees = "W" if "W" in kinds else "B"
    if len(placement) % slices:
        raise InputError(
            f"schedule {name!r}: there are {len(placement)} stages in {slices} slices; give a "
            "placement that has as many for each, such as round_robin(slices)"
        )
    waits, then = _dependencies(kinds, microbatches, placement, slices, edges)
    home = {task: placement[task.stage or 0] for task in waits}
    entries = {
        task: (urgency(task, devices), task.stage, task.microbatch, task.kind, task)
        for task in waits
    }
    room: list[float] = [
        float("inf") if limit is None else limit(d, devices) if callable(limit) else limit
        for d in range(devices)
    ]
    kept = _Bytes(devices, len(placement), "W" in kinds, bytes_of)
    coming: list[list[Any]] = [[] for _ in room]  # the forwards that have not started, in order
    for task, entry in entries.items():
        if task.kind == "F":
            coming[home[task]].append(entry)
    for row in coming:
        row.sort()
    # those that have their inputs: forwards, and other tasks, which need no room
    ready: list[tuple[list[Any], list[Any]]] = [([], []) for _ in room]
    rows: list[list[Task]] = [[] for _ in room]
    idle = [True] * devices
    running: list[tuple[float, int, Task]] = []  # when it ends, its device, the task
    for task, needs in waits.items():
        if not needs:
            heappush(ready[home[task]][task.kind != "F"], entries[task])
    now: float = 0
    while True:
        while running and running[0][0] == now:
            _, device, task = heappop(running)
            idle[device] = True
            room[device] += task.kind == frees
            kept.end(device, task)
            for follower in then[task]:
                waits[follower] -= 1
                if not waits[follower]:
                    heappush(ready[home[follower]][follower.kind != "F"], entries[follower])
        for device, (forwards, others) in enumerate(ready):
            if not idle[device]:
                continue
            before = bisect_left(coming[device], forwards[0]) if forwards else 0
            fits = bool(forwards) and before < room[device]
            fits = fits and kept.room(device, coming[device][: before + 1])
            if not fits and not others:
                continue
            first = fits and (not others or forwards[0] < others[0])
            task = heappop(forwards if first else others)[-1]
            if first:
                del coming[device][before]
                room[device] -= 1
                kept.start(device, task)
            rows[device].append(task)
            idle[device] = False
            own = task.kind, task.stage
            time = costs[own if own in costs else task.kind]
            heappush(running, (now + time, device, task))
        if not running:
            break
        now = running[0][0]
    if sum(map(len, rows)) < len(waits):
        raise InputError(
            f"schedule {name!r}: the devices wait for one another with the forwards that their "
            f"limits allow; raise {'limit=' if bytes_of is None else 'memory= or limit='}, or let "
            "those that are needed first sort first"
        )
    return rows


class _Bytes:
    """The bytes that devices have left for their micro-batches."""

    def __init__(
        self,
        devices: int,
        stages: int,
        halves: bool,
        given: tuple[float | Callable[[int, int], float], KeptBytes] | None,
    ) -> None:
        if given is None:
            self._left, self._deferred = [float("inf")] * devices, [0.0] * stages
            self._most = [0.0] * stages
            return
        memory, sizes = given
        self._left = [memory(d, devices) if callable(memory) else memory for d in range(devices)]
        self._deferred = [sizes.deferred.get(s, 0) if halves else 0 for s in range(stages)]
        self._most = [max(sizes.saved.get(s, 0), more) for s, more in enumerate(self._deferred)]

    def room(self, device: int, forwards: list[Any]) -> bool:
        """Whether so many entries of forwards fit, together."""
        left = self._left[device]
        if left == float("inf"):
            return True
        return bool(left >= sum(self._most[entry[1]] for entry in forwards))

    def start(self, device: int, forward: Task) -> None:
        self._left[device] -= self._most[forward.stage or 0]

    def end(self, device: int, task: Task) -> None:
        most, late = self._most[task.stage or 0], self._deferred[task.stage or 0]
        self._left[device] += {"B": most, "I": most - late, "W": late}.get(task.kind, 0)


def _dependencies(
    kinds: str, microbatches: int, placement: tuple[int, ...], slices: int, edges: Edges | None
) -> tuple[dict[Task, int], dict[Task, list[Task]]]:
    """Each task → how many others it waits for, and each task → those that wait for it."""
    keys = [*product(kinds, range(microbatches), range(len(placement)))]
    tasks = [Task(*key) for key in keys]
    then: dict[Task, list[Task]] = {task: [] for task in tasks}
    waits = dict.fromkeys(tasks, 0)
    needs = needs_of(
        Schedule("", microbatches, placement, (tuple(tasks),), slices=slices, edges=edges)
    )
    for task, key in zip(tasks, keys, strict=True):
        for need in (Task(*needed) for needed in needs(key)):
            if need in then:
                waits[task] += 1
                then[need].append(task)
    return waits, then
