"""The verifier of a Schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from numbers import Integral

from fxpipe.errors import Fault, VerificationError
from fxpipe.ir.schedule import Schedule, delay_text
from fxpipe.ir.task import Key, is_task
from fxpipe.ir.walk import Wait, needs_of, walk
from fxpipe.parts import Parts
from fxpipe.torchtools.state import without_collection
from fxpipe.verify.tasks import (
    Spot,
    Window,
    ascending,
    complete,
    counts_faults,
    pairs,
    too_early,
)


@without_collection()
def verify_schedule(schedule: Schedule) -> Schedule:
    """Return the schedule, or raise VerificationError with every fault.

    The time is proportional to the number of tasks.
    """
    window, faults, whole = _judge(schedule)
    if whole and schedule.overlaps:  # with missing tasks, delays mean nothing
        faults += Parts.delays.find(f"schedule {schedule.name!r}")(window)
    _refuse(schedule, faults)
    return schedule


def ordered_window(schedule: Schedule) -> Window:
    """The tasks of a schedule. Raises VerificationError if some are missing, or not in order."""
    window, faults, _ = _judge(schedule)
    _refuse(schedule, faults)
    return window


def _judge(schedule: Schedule) -> tuple[Window, list[Fault], bool]:
    """Return the window, its faults, and whether its tasks are complete and well-formed."""
    _refuse(schedule, list(_frame(schedule)))
    window = Window(schedule)
    faults = [*window.faults, *complete(window, _everywhere(schedule, window))]
    whole = not faults
    if schedule.copies:
        faults += Parts.run_together.find(f"schedule {schedule.name!r}")(window)
    faults += pairs(window)
    faults += ascending(window)
    faults += dependencies(window, needs_of(schedule))
    faults += gradients_used_up(window)
    return window, faults, whole


def _everywhere(schedule: Schedule, window: Window) -> list[str]:
    """The kinds of tasks that come once a step and that every stage must have."""
    there = {kind for kind, _, _ in window.spots}
    return [*("U" if window.trains else ""), *(kind for kind in "AC" if kind in there)]


def dependencies(window: Window, needs: Callable[[Key], Iterable[Key]]) -> Iterator[Fault]:
    """Check that each task comes after those that it needs, and that no devices deadlock."""
    waits: list[list[Wait]] = [[] for _ in window.schedule.rows]
    spots, seconds = window.spots, window.seconds
    for key, at in spots.items():
        late: Spot | None = None
        for needed in needs(key):
            on = spots.get(needed)
            if on is None:
                continue  # reported as missing, or optional
            if on.device == at.device:
                if on.moment > (at if late is None else late).moment:
                    late = on
            elif on.batch == at.batch:
                # what a forward makes leaves at the end of its pair
                end = on.position + ((on.device, on.position + 1) in seconds)
                waits[at.device].append((at.position, on.device, end))
            elif on.batch < at.batch:
                yield window.fault(at, *too_early(window, at, on))
        if late is not None:
            yield window.fault(at, *too_early(window, at, late))
    yield from walk(window.ends, waits).faults(
        window.text, "reorder one of the devices of the circle"
    )


def gradients_used_up(window: Window) -> Iterator[Fault]:
    """Check that a user's task gets the gradients that it needs: the update uses them up."""
    for of_stage in window.by_stage:
        update: Spot | None = None
        for _, letter, _, spot in of_stage:
            kind = window.kinds[letter]
            if letter == "U":
                update = spot
            elif update and "gradients" in kind.reads:
                where = f"{window.text(*update[:2])}, position {update.position}"
                yield window.fault(
                    spot, f"it needs gradients that {where}, has used up", "move it before that"
                )


def _refuse(schedule: Schedule, faults: list[Fault]) -> None:
    if faults:
        raise VerificationError(f"schedule {schedule.name!r}", faults, schedule)


def _frame(schedule: Schedule) -> Iterator[Fault]:
    """Check the types, counts, placement and delays, without which nothing else can be judged."""
    for device, row in enumerate(schedule.rows):
        for position, task in enumerate(row):
            if not is_task(task):
                what, cure = "it is not a task with whole numbers", "write F(0) or Task('F', 0)"
                yield Fault(what, cure, device, position, repr(task))
                return
    counts = schedule.microbatches, *schedule.placement, *schedule.delays
    for number in chain(counts, *schedule.copies, *(schedule.edges or ())):
        if not isinstance(number, Integral):
            what = f"a count, a stage, a device or a delay is {number!r}"
            yield Fault(what, "give whole numbers")
            return
    held = sum(map(len, schedule.rows))
    reach = max(schedule.depth, *schedule.delays, 0)
    yield from counts_faults(
        schedule.microbatches, schedule.placement, schedule.devices, held, reach
    )
    if len(schedule.delays) != schedule.stages:
        yield Fault(
            f"it has {len(schedule.delays)} delays for {schedule.stages} stages",
            "give one for all stages, or one for each",
        )
    slices, places = schedule.slices, schedule.placement
    if not isinstance(slices, Integral) or slices < 1 or schedule.stages % slices:
        yield Fault(
            f"it has {schedule.stages} stages in {slices!r} slices",
            "give each slice as many stages as the others",
        )
    elif any(places[s] != places[s % (schedule.stages // slices)] for s in range(schedule.stages)):
        yield Fault(
            "slices of a stage are on different devices",
            "place all on one, as round_robin(slices) does: they share weights",
        )
    elif slices > 1 and schedule.copies:
        yield Fault("it has slices and copies of stages", "leave one of them out")
    count = schedule.stages // max(slices, 1) if isinstance(slices, Integral) else 0
    for edge in schedule.edges or ():
        if not 0 <= edge[0] < edge[1] < count:
            cure = f"give pairs of its stages 0 to {count - 1}, the one that feeds the other first"
            yield Fault(f"its edges have {edge}", cure)
    every = range(schedule.microbatches), range(schedule.stages)
    for pair in schedule.frozen:
        if pair[0] not in every[0] or pair[1] not in every[1]:
            what, cure = f"{pair} is frozen", "give pairs of a micro-batch and a stage that it has"
            yield Fault(what, cure)
    if min(schedule.delays, default=0) < 0:
        yield Fault(f"its delay is {delay_text(schedule.delay)}", "give at least 0")
    if schedule.copies:
        misplaced = Parts.copies_faults.find(f"schedule {schedule.name!r}")
        yield from misplaced(schedule.placement, schedule.copies, schedule.devices)
        if schedule.overlaps:
            yield Fault(
                "it has copies of stages, and its batches overlap or read older weights",
                "end each step with a flush: delay=0, and tasks of this step's batch alone",
            )
