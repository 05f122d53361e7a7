"""Whether a schedule computes a step: every task once, in its place, in order, without deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from fxpipe.errors import Fault, VerificationError, near
from fxpipe.schedule import KINDS, Schedule, Task, TaskKind
from fxpipe.verify.spans import microbatches
from fxpipe.verify.waits import Place, Wait, deadlock_faults

Key = tuple[str, int | None, int]
"""Kind, micro-batch and stage."""

Places = dict[Key, Place]
"""Each well-formed task → where it stands first."""


def verify_schedule(schedule: Schedule) -> Schedule:
    """Return the schedule, or raise VerificationError with every fault.

    It takes time in proportion to the number of tasks.
    """
    faults = list(_overlap(schedule)) or list(_frame(schedule))
    if not faults:
        places: Places = {}
        faults += _tasks(schedule, places)
        faults += _missing(schedule, places)
        faults += _ascending(schedule, places)
        faults += _dependencies(schedule, places)
    if faults:
        raise VerificationError(f"schedule {schedule.name!r}", faults)
    return schedule


def _overlap(schedule: Schedule) -> Iterator[Fault]:
    overlapping = any(task.batch for row in schedule.rows for task in row)
    if schedule.delay or overlapping:
        yield Fault(
            "it lets batches overlap, and that is not run yet",
            "use delay=0 and only tasks of this step's batch",
        )


def _frame(schedule: Schedule) -> Iterator[Fault]:
    """The counts and the placement; the tasks cannot be judged without them."""
    if schedule.microbatches < 1:
        yield Fault(f"it has {schedule.microbatches} micro-batches", "give it at least 1")
    if not schedule.placement:
        yield Fault("it has no stages", "place at least one")
    for stage, device in enumerate(schedule.placement):
        if not 0 <= device < schedule.devices:
            yield Fault(
                f"stage {stage} is placed on device {device}",
                f"place it on one of the {schedule.devices} devices, numbered from 0",
            )


def _tasks(schedule: Schedule, places: Places) -> Iterator[Fault]:
    """Each task by itself, and those that are there twice; fills in ``places``."""
    for device, row in enumerate(schedule.rows):
        for position, task in enumerate(row):
            wrong = _malformed(schedule, task)
            if wrong is None:
                key = _key(task)
                home = schedule.placement[key[2]]
                first = places.setdefault(key, Place(device, position))
                if first != (device, position):
                    where = f"device {first.device}, position {first.position}"
                    wrong = f"it is there already: {where}", "keep one"
                elif home != device:
                    wrong = f"stage {task.stage} is on device {home}", "move the task there"
            if wrong is not None:
                yield Fault(*wrong, device, position, str(task))


def _malformed(schedule: Schedule, task: Task) -> tuple[str, str] | None:
    """What is wrong with a task by itself, and the cure."""
    if task.kind not in KINDS:
        return f"there is no kind of task {task.kind!r}", near(task.kind, KINDS)
    if task.stage is None:
        return "it names no stage", "name one"
    if not 0 <= task.stage < schedule.stages:
        return f"there is no stage {task.stage}", f"name one of the {schedule.stages}, from 0"
    if not KINDS[task.kind].per_microbatch:
        if task.microbatch is not None:
            return "it comes once a step, not for a micro-batch", "leave the micro-batch out"
    elif task.microbatch is None:
        return "it names no micro-batch", "name one"
    elif not 0 <= task.microbatch < schedule.microbatches:
        return (
            f"there is no micro-batch {task.microbatch}",
            f"name one of the {schedule.microbatches}, from 0",
        )
    return None


def _missing(schedule: Schedule, places: Places) -> Iterator[Fault]:
    """Every stage has every task; where nothing but forwards is, nothing else is missed."""
    trains = any(kind != "F" for kind, _, _ in places)
    for stage, device in enumerate(schedule.placement):
        for kind in KINDS.values():
            if kind.letter != "F" and not trains:
                continue
            lacks = [i for i in _indices(schedule, kind) if (kind.letter, i, stage) not in places]
            if lacks:
                of = (
                    ""
                    if None in lacks
                    else f" of {microbatches(i for i in lacks if i is not None)}"
                )
                yield Fault(f"stage {stage} has no {kind.name}{of}", "add it", device)


def _indices(schedule: Schedule, kind: TaskKind) -> list[int | None]:
    return list(range(schedule.microbatches)) if kind.per_microbatch else [None]


def _ascending(schedule: Schedule, places: Places) -> Iterator[Fault]:
    """A stage's tasks of a kind take the micro-batches in order.

    Gradients are added, and buffers such as BatchNorm's statistics written, in that order.
    """
    latest: dict[tuple[str, int], int] = defaultdict(lambda: -1)
    for (kind, i, stage), (device, position) in places.items():
        if i is not None:
            before = latest[kind, stage]
            if i < before:
                yield Fault(
                    f"it comes after micro-batch {before}",
                    "let a stage take the micro-batches in ascending order",
                    device,
                    position,
                    str(schedule.rows[device][position]),
                )
            latest[kind, stage] = max(before, i)


def _dependencies(schedule: Schedule, places: Places) -> Iterator[Fault]:
    """Run the rows against each other."""
    waits: list[list[Wait]] = [[] for _ in schedule.rows]
    for key, at in places.items():
        late: Place | None = None
        for needed in _needs(schedule, key):
            on = places.get(needed)
            if on is None:
                continue  # reported as missing
            if on.device != at.device:
                waits[at.device].append(Wait(at, on))
            elif on.position > at.position and (late is None or on > late):
                late = on
        if late is not None:
            yield Fault(
                f"it comes before {_text(schedule, late)}, position {late.position}, which it "
                "needs",
                "move it behind that",
                at.device,
                at.position,
                _text(schedule, at),
            )
    yield from deadlock_faults(
        waits, lambda place: _text(schedule, place), "reorder one of the devices of the circle"
    )


def _needs(schedule: Schedule, key: Key) -> Iterator[Key]:
    """The tasks that must come before a task."""
    letter, i, stage = key
    kind = KINDS[letter]
    for before in kind.follows:
        for j in _indices(schedule, KINDS[before]) if i is None else (i,):
            yield before, j, stage
    if kind.flow and 0 <= stage - kind.flow < schedule.stages:
        yield letter, i, stage - kind.flow


def _key(task: Task) -> Key:
    assert task.stage is not None
    return task.kind, task.microbatch, task.stage


def _text(schedule: Schedule, place: Place) -> str:
    return str(schedule.rows[place.device][place.position])
