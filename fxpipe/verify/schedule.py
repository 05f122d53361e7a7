"""Whether a schedule computes its steps: every task once, in its place and order, no deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from fxpipe.errors import Fault, VerificationError
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import KINDS
from fxpipe.torchtools.state import without_collection
from fxpipe.verify.order import ascending, dependencies, gradients_used_up
from fxpipe.verify.spans import microbatches
from fxpipe.verify.stash import Stash, StashLimit, stash_of, too_much
from fxpipe.verify.versions import Versions, too_small, versions_of
from fxpipe.verify.window import Window, frame_faults

_ORDER = (ascending, dependencies, gradients_used_up)


@without_collection()
def verify_schedule(schedule: Schedule, stash_limit: StashLimit | None = None) -> Schedule:
    """Return the schedule, or raise VerificationError with every fault.

    It takes time in proportion to the number of tasks.

    Args:
        schedule: any.
        stash_limit: the most micro-batches that a device may keep between forward and backward,
            over all its stages; or one number for each stage.

    Raises:
        VerificationError: with every fault.
        InputError: the limit is no count, or there is not one for each stage.
    """
    window, faults = _read(schedule)
    complete = not faults
    for rule in _ORDER:
        faults += rule(window)
    if complete:  # or numbers would be told that mean nothing
        faults += too_small(window)
        if stash_limit is not None:
            faults += too_much(window, stash_limit)
    if faults:
        raise _error(schedule, faults)
    return schedule


def schedule_versions(schedule: Schedule) -> Versions:
    """What its delay and its order mean for the weights; the delay may be too small.

    Raises:
        VerificationError: something else is wrong with the schedule.
    """
    return versions_of(_ordered(schedule))


def schedule_stash(schedule: Schedule) -> Stash:
    """What it keeps between forward and backward.

    Raises:
        VerificationError: its tasks are not all there, or not in order.
    """
    return stash_of(_ordered(schedule))


def _ordered(schedule: Schedule) -> Window:
    window, faults = _read(schedule)
    for rule in _ORDER:
        faults += rule(window)
    if faults:
        raise _error(schedule, faults)
    return window


def _read(schedule: Schedule) -> tuple[Window, list[Fault]]:
    """The window, and what is wrong with its tasks but for their order."""
    faults = list(frame_faults(schedule))
    if faults:
        raise _error(schedule, faults)
    window = Window(schedule)
    return window, list(_incomplete(window))


def _error(schedule: Schedule, faults: list[Fault]) -> VerificationError:
    return VerificationError(f"schedule {schedule.name!r}", faults, schedule)


def _incomplete(window: Window) -> Iterator[Fault]:
    """Tasks that are wrong by themselves, there twice or missing."""
    yield from window.faults
    schedule, spots = window.schedule, window.spots
    trains = any(kind != "F" for kind, _, _ in spots)
    clips = any(kind == "C" for kind, _, _ in spots)
    for stage, device in enumerate(schedule.placement):
        lacks: dict[str, list[int]] = defaultdict(list)
        for i in range(schedule.microbatches):
            if ("F", i, stage) not in spots:
                lacks["forward"].append(i)
            whole = ("B", i, stage) in spots
            halves = [kind for kind in "IW" if (kind, i, stage) in spots]
            if whole and halves:
                yield Fault(
                    f"stage {stage} has a whole backward of micro-batch {i} and a half of it",
                    "keep B, or I and W",
                    device,
                )
            elif len(halves) == 1:
                lacks[KINDS["W" if halves == ["I"] else "I"].name].append(i)
            elif trains and not whole and not halves:
                lacks["backward"].append(i)
        for name, indices in lacks.items():
            yield Fault(f"stage {stage} has no {name} of {microbatches(indices)}", "add it", device)
        if trains and ("U", None, stage) not in spots:
            yield Fault(f"stage {stage} has no update", "add it", device)
        if clips and ("C", None, stage) not in spots:
            yield Fault(f"stage {stage} has no clip", "clip every stage or none", device)
