"""Rules for the order of a schedule's tasks: what needs what, in which order sums are made.

A window repeats, step after step, and the rules hold for all steps though they look at one:

- The first steps leave out tasks of batches that do not exist, and so does the flush. That keeps
  the order of all others, and a task needs only tasks of its own batch, which run whenever it
  does. So what holds where all batches exist holds at both ends as well.
- On one device batch t meets a task of batch b in step t − b. Its tasks therefore come in the order
  of (−b, position), whatever the step.
- Between devices a task that stands for batch b needs one that stands for batch c, and that runs
  b − c steps later. A later step is refused: a step ends when all devices are through their
  windows. A wait for an earlier step is over before the window begins, so a circle of waits lies
  within one window, and running one window against itself, with the waits inside it, finds it.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.errors import Fault
from fxpipe.ir.task import KINDS
from fxpipe.ir.walk import Wait, needs_of, walk
from fxpipe.verify.window import Spot, Window

_LINES = {"F": "forwards", "B": "gradients", "W": "gradients"}
"""What takes the micro-batches in order: buffers such as BatchNorm's statistics are written, and
gradients are added, in that order."""


def ascending(window: Window) -> Iterator[Fault]:
    """A stage's forwards take the micro-batches in order, and so does what adds to its gradients.

    Its forwards take whole batches in order, too; each batch has gradients of its own.
    """
    for own in window.by_stage:
        runs: dict[str, list[tuple[int, Spot]]] = {"forwards": [], "gradients": []}
        for _, kind, i, spot in own:
            if kind in _LINES and i is not None:
                runs[_LINES[kind]].append((i, spot))
        for run in runs.values():
            yield from _descents(window, run)
        if forwards := runs["forwards"]:
            first, last = forwards[0][1], forwards[-1][1]
            if last.moment >= (1 - first.batch, first.position):
                yield window.fault(
                    last,
                    f"it comes after {window.text(first)} of the next batch",
                    "finish a batch's forwards on a stage before those of the next begin",
                )


def _descents(window: Window, run: list[tuple[int, Spot]]) -> Iterator[Fault]:
    latest = -1
    for i, spot in run:
        if i < latest:
            yield window.fault(
                spot,
                f"it comes after micro-batch {latest}",
                "let a stage take the micro-batches in ascending order",
            )
        latest = max(latest, i)


def dependencies(window: Window) -> Iterator[Fault]:
    """Run the rows against each other."""
    waits: list[list[Wait]] = [[] for _ in window.schedule.rows]
    needs = needs_of(window.schedule)
    spots = window.spots
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
                waits[at.device].append((at.position, on.device, on.position))
            elif on.batch < at.batch:
                yield _too_early(window, at, on)
        if late is not None:
            yield _misplaced(window, at, late)
    rows = window.schedule.rows
    yield from walk(list(map(len, rows)), waits).faults(
        lambda device, position: str(rows[device][position]),
        "reorder one of the devices of the circle",
    )


def _misplaced(window: Window, at: Spot, on: Spot) -> Fault:
    if on.batch == at.batch:
        return window.fault(
            at,
            f"it comes before {window.text(on)}, position {on.position}, which it needs",
            "move it behind that",
        )
    return _too_early(window, at, on)


def _too_early(window: Window, at: Spot, on: Spot) -> Fault:
    steps = at.batch - on.batch
    later = "the next step" if steps == 1 else f"{steps} steps later"
    return window.fault(
        at,
        f"its batch runs {window.text(on)}, which it needs, only in {later}: device {on.device}, "
        f"position {on.position}",
        "let both stand for the same batch, or that one for a later batch",
    )


def gradients_used_up(window: Window) -> Iterator[Fault]:
    """A user's task looks at gradients before the update of their batch, which uses them up."""
    for own in window.by_stage:
        update: Spot | None = None
        for _, kind, _, spot in own:
            if kind == "U":
                update = spot
            elif update and "gradients" in (*KINDS[kind].reads, *KINDS[kind].writes):
                yield window.fault(
                    spot,
                    f"it needs gradients that {window.text(update)}, position {update.position}, "
                    "has used up",
                    "move it before that",
                )
