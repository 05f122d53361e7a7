"""Find options with which a step that exceeds its memory limits would keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from fxpipe.compiler.timetable import Timetable
from fxpipe.errors import FxpipeError
from fxpipe.ir.recipe import find_recipe
from fxpipe.ir.schedule import Schedule

_LESS_MEMORY = ("1f1b", "interleaved-1f1b", "zb-h1", "v-half", "v-min")
"""Schedules with a flush that keep fewer micro-batches than others of the same placement."""


def remedies(
    timetable: Timetable, schedule: Schedule, samples: int, fits: Callable[[Schedule], bool]
) -> str:
    """The options that would each be enough alone, at most one of a kind, as a sentence's end.

    Args:
        timetable: makes the pipe's schedules.
        schedule: the schedule whose step exceeds the limits.
        samples: how many samples the batch has.
        fits: whether the same stages would keep the limits under a schedule; raises FxpipeError
            where they cannot run it.
    """
    own = schedule.microbatches
    again = [('recompute="always"', timetable.changed(recompute="always"), own)]
    names = [name for name in _LESS_MEMORY if name != schedule.name]
    others = [(f'schedule="{n}"', timetable.changed(recipe=find_recipe(n)), own) for n in names]
    counts = [own * 2**power for power in range(1, (samples // own).bit_length())]
    finer = [(f"microbatches={count}", timetable, count) for count in counts]
    found = [text for kind in (again, others, finer) for text in _first(kind, fits)]
    if not found:
        return "no recompute, schedule or number of micro-batches is predicted to be enough"
    return f"predicted to be enough with the same stages: {' or '.join(found)}"


def _first(
    kind: Iterable[tuple[str, Timetable, int]], fits: Callable[[Schedule], bool]
) -> Iterator[str]:
    """The description of the first option that fits; nothing if none does."""
    for text, timetable, microbatches in kind:
        with suppress(FxpipeError):  # an option that the pipe cannot run with is left out
            if fits(timetable.schedule(microbatches, "step")):
                yield text
                return
