"""The rules for the tasks of a step, in a schedule and in the program made of it.

The window of tasks repeats in each step. The rules look at one window and yet hold for all steps:

- The first steps and the flush leave out the tasks of batches that do not exist. The others keep
  their order, and a task needs only tasks of its own batch, which run if it does. So what holds
  where all batches exist also holds at both ends of a run.
- On one device, batch t runs a task marked for batch b in step t − b. So its tasks run in the order
  of (−b, position).
- If a task marked for batch b needs one on another device that is marked for batch c, that one runs
  b − c steps later. A later step is refused, for a step ends when all devices have finished their
  windows. An earlier step is over by then, so a circle of waits lies within one window, where a
  walk over all devices finds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from fxpipe.errors import Fault, near
from fxpipe.formatting import numbers_text
from fxpipe.ir.instruction import Wrong
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.task import BESIDE_FORWARD, KINDS, WITHOUT_GRADIENTS, Key, Task, TaskKind
from fxpipe.ir.value import FURTHEST
from fxpipe.ir.walk import Place, key_index

_MISSING = 10_000
"""The most missing forwards that are reported one by one."""


class Spot(NamedTuple):
    """The place of a task in a window, and the batch for which it runs."""

    device: int
    position: int
    batch: int

    @property
    def moment(self) -> tuple[int, int]:
        """When a batch runs the task, in the order of its device."""
        return -self.batch, self.position


class Window:
    """The tasks of a step.

    Attributes:
        schedule: the tasks; its counts and placement must be right.
        kinds: letter → kind, of all kinds that a task may have.
        text: device and position → the text of what stands there.
        spots: each well-formed task → its first place; row after row, in order.
        wrong: the place of each task that is wrong by itself or there twice → what is wrong.
        ends: device → the position behind its last task.
        seconds: device and position of the second task of each pair.
    """

    def __init__(
        self,
        schedule: Schedule,
        kinds: Mapping[str, TaskKind] = KINDS,
        positions: Sequence[Iterable[int]] | None = None,
        text: Callable[[int, int], str] | None = None,
    ) -> None:
        self.schedule = schedule
        self.kinds = kinds
        self.text = text or self._text
        self.spots: dict[Key, Spot] = {}
        self.wrong: dict[Place, Wrong] = {}
        self.ends: list[int] = []
        self.seconds = {
            (device, position)
            for device, row in enumerate(schedule.rows if schedule.paired else ())
            for position, task in enumerate(row)
            if task in schedule.paired
        }
        for device, row in enumerate(schedule.rows):
            position = -1
            row_positions = range(len(row)) if positions is None else positions[device]
            for position, task in zip(row_positions, row, strict=True):
                if wrong := self._place(task, Spot(device, position, task.batch)):
                    self.wrong[Place(device, position)] = wrong
            self.ends.append(position + 1)

    @property
    def faults(self) -> Iterator[Fault]:
        """A fault for each entry of ``wrong``."""
        for place, (what, cure) in self.wrong.items():
            yield Fault(what, cure, *place, self.text(*place))

    def fault(self, spot: Spot, what: str, cure: str) -> Fault:
        """Make a fault of the task at a spot."""
        return Fault(what, cure, spot.device, spot.position, self.text(*spot[:2]))

    @cached_property
    def trains(self) -> bool:
        """Whether there are other tasks than those of inference."""
        return any(kind not in WITHOUT_GRADIENTS for kind, _, _ in self.spots)

    @cached_property
    def by_stage(self) -> Sequence[Sequence[tuple[tuple[int, int], str, int | None, Spot]]]:
        """Stage → moment, kind, micro-batch and spot of its tasks, in the order of a batch. Further
        entries, behind those of all stages, are of their copies."""
        entries: dict[tuple[int, int], list[tuple[tuple[int, int], str, int | None, Spot]]] = {
            (stage, home): [] for stage, home in enumerate(self.schedule.placement)
        }
        for (kind, i, stage), spot in self.spots.items():
            copy = self._has_copy(spot.device, stage)
            device = spot.device if copy else self.schedule.placement[stage]
            entries.setdefault((stage, device), []).append((spot.moment, kind, i, spot))
        if self.schedule.depth:
            for of_stage in entries.values():
                of_stage.sort(key=lambda entry: entry[0])
        return [*entries.values()]

    def _has_copy(self, device: int, stage: int) -> bool:
        copies = self.schedule.copies
        return bool(copies) and device in copies[stage]

    def _text(self, device: int, position: int) -> str:
        """The text of a task, or of its pair."""
        row = self.schedule.rows[device]
        if (device, position + 1) in self.seconds:
            return f"{row[position]}&{row[position + 1]}"
        if position and (device, position) in self.seconds:
            return f"{row[position - 1]}&{row[position]}"
        return str(row[position])

    def _place(self, task: Task, here: Spot) -> Wrong | None:
        """Note the place of a task, and return what is wrong with the task."""
        wrong = self._malformed(task)
        if wrong is not None:
            return wrong
        assert task.stage is not None
        home, stage = self.schedule.placement[task.stage], task.stage
        copied = self._has_copy(here.device, stage)
        i = key_index(self.schedule, task, here.device) if copied else task.microbatch
        first = self.spots.setdefault((task.kind, i, stage), here)
        if copied and task.kind not in "FBIWROPA":
            what = f"device {here.device} has a copy of stage {stage}, which computes micro-batches"
            return f"{what} alone; its weights are on device {home}", "move it there"
        if not copied and home != here.device:
            return f"stage {stage} is on device {home}", "move it there"
        if first is not here and not self.kinds[task.kind].repeats:
            where = f"device {first.device}, position {first.position}"
            return f"it is there already: {where}", "keep one"
        return None

    def _malformed(self, task: Task) -> Wrong | None:
        kind, i, stage = self.kinds.get(task.kind), task.microbatch, task.stage
        if kind is None:
            return f"there is no kind of task {task.kind!r}", near(task.kind, KINDS)
        if stage is None:
            return "it names no stage", "name one"
        if not 0 <= stage < self.schedule.stages:
            return f"there is no stage {stage}", f"name one of the {self.schedule.stages}, from 0"
        if kind.per_microbatch == (i is None):
            if i is None:
                return "it names no micro-batch", "name one"
            return "it comes once a step, not for a micro-batch", "leave the micro-batch out"
        return wrong_batch(task.batch, i or 0, self.schedule.microbatches)


def wrong_batch(batch: int, microbatch: int, microbatches: int) -> Wrong | None:
    """What is wrong with the batch and the micro-batch of a task or an instruction."""
    if batch > 0:
        return (
            "it belongs to a later step's batch",
            "give it this step's batch, 0, or that of an earlier step, such as -1",
        )
    if not 0 <= microbatch < microbatches:
        return f"there is no micro-batch {microbatch}", f"name one of the {microbatches}, from 0"
    return None


def counts_faults(
    microbatches: int, placement: Sequence[int], devices: int, held: int | None, reach: int
) -> Iterator[Fault]:
    """Check the counts and the placement; unless they are right, no task can be judged.

    They are bounded, for a short text can ask for counts with which verification would never end.

    Args:
        microbatches: the number of micro-batches a batch.
        placement: stage → device.
        devices: the number of devices.
        held: the number of tasks, or instructions; None while some may still be missing.
        reach: the most batches that a task, an instruction or a delay reaches back.
    """
    if microbatches < 1:
        yield Fault(f"it has {microbatches} micro-batches", "give it at least 1")
    if not placement:
        yield Fault("it has no stages", "place at least one")
    for stage, device in enumerate(placement):
        if not 0 <= device < devices:
            yield Fault(
                f"stage {stage} is placed on device {device}",
                f"place it on one of the {devices} devices, numbered from 0",
            )
    forwards = len(placement) * microbatches
    if held is not None and forwards > held + _MISSING:
        yield Fault(
            f"its {microbatches} micro-batches have at least {forwards} forwards on "
            f"{len(placement)} stages, and it holds {held} tasks",
            f"write them all (at most {_MISSING} may be missing for each to be named), or take "
            "fewer micro-batches",
        )
    if reach > FURTHEST:
        yield Fault(
            f"it reaches {reach} batches back", f"let delays and tasks reach at most {FURTHEST}"
        )


def complete(window: Window, everywhere: Collection[str]) -> Iterator[Fault]:
    """Check that no task is missing, and that backwards are whole or in halves, not both.

    Args:
        window: the tasks.
        everywhere: the kinds that come once a step and that every stage must have.
    """
    spots = window.spots
    offloads = any(kind in "OP" for kind, _, _ in spots)
    for stage, device in enumerate(window.schedule.placement):
        lacks: dict[str, list[int]] = defaultdict(list)
        for i in range(window.schedule.microbatches):
            if ("F", i, stage) not in spots:
                lacks["forward"].append(i)
            whole = ("B", i, stage) in spots
            halves = [kind for kind in "IW" if (kind, i, stage) in spots]
            if (i, stage) in window.schedule.frozen:
                if whole or halves != ["I"]:
                    yield Fault(
                        f"stage {stage} is frozen for micro-batch {i}",
                        "give it one I, and neither B nor W",
                        device,
                    )
            elif whole and halves:
                yield Fault(
                    f"stage {stage} has a whole backward of micro-batch {i} and a half of it",
                    "keep the whole backward, or both of its halves",
                    device,
                )
            elif len(halves) == 1:
                lacks[KINDS["W" if halves == ["I"] else "I"].name].append(i)
            elif window.trains and not whole and not halves:
                lacks["backward"].append(i)
            if offloads:
                yield from _offload(window, i, stage)
        for name, indices in lacks.items():
            yield Fault(
                f"stage {stage} has no {name} of {microbatches_text(indices)}", "add it", device
            )
        for kind in everywhere:
            if (kind, None, stage) not in spots:
                known = window.kinds[kind]
                yield Fault(f"stage {stage} has no {known.name}", known.lacking, device)


def pairs(window: Window) -> Iterator[Fault]:
    """Check that each pair is a forward and, right behind it, a backward of another micro-batch."""
    schedule = window.schedule
    placed = {schedule.rows[device][position] for device, position in window.seconds}
    for task in sorted(schedule.paired - placed, key=str):
        yield Fault(f"{task} is in paired and in no row", "leave it out")
    for device, position in sorted(window.seconds):
        row = schedule.rows[device]
        first, second = row[position - 1], row[position]
        spot = Spot(device, position, second.batch)
        if not position or first.kind != "F" or second.kind not in BESIDE_FORWARD:
            what = "a pair is a forward with a backward behind it"
            yield window.fault(spot, what, "write one such as F1&B0, or the tasks one by one")
        elif (first.microbatch, first.batch) == (second.microbatch, second.batch):
            what = "they would start together, and the backward needs the forward"
            yield window.fault(spot, what, "pair different micro-batches")


def _offload(window: Window, i: int, stage: int) -> Iterator[Fault]:
    stored, back = (window.spots.get((kind, i, stage)) for kind in "OP")
    if stored is not None and back is None:
        yield window.fault(stored, "it is never fetched", "add its P before the backward or R")
    elif back is not None and stored is None:
        yield window.fault(back, "it fetches what is never stored", "add its O behind the forward")


def ascending(window: Window) -> Iterator[Fault]:
    """Check that each stage's forwards take the micro-batches in order, as they write buffers such
    as BatchNorm's statistics, and finish a batch before the next begins. Gradients may be added in
    any order; sums are then rounded as those of a loop that adds them in the same order."""
    for of_stage in window.by_stage:
        latest = -1
        forwards: list[Spot] = []
        for _, kind, i, spot in of_stage:
            if kind != "F" or i is None:
                continue
            forwards.append(spot)
            if i < latest:
                yield window.fault(
                    spot,
                    f"it comes after micro-batch {latest}",
                    "let the forwards of a stage take the micro-batches in ascending order",
                )
            latest = max(latest, i)
        if forwards and forwards[-1].moment >= (1 - forwards[0].batch, forwards[0].position):
            yield window.fault(
                forwards[-1],
                f"it comes after {window.text(*forwards[0][:2])} of the next batch",
                "finish a batch's forwards on a stage before those of the next begin",
            )


def too_early(window: Window, at: Spot, on: Spot) -> Wrong:
    """What is wrong with what stands at a spot and needs what its batch runs later."""
    steps, text = at.batch - on.batch, window.text(*on[:2])
    if not steps:
        what = f"it comes before {text}, position {on.position}, which it needs"
        return what, "move it behind that"
    return (
        f"its batch runs {text}, which it needs, only {steps_later(steps)}: device {on.device}, "
        f"position {on.position}",
        "let both stand for the same batch, or that one for a later batch",
    )


def microbatches_text(indices: Sequence[int]) -> str:
    """``micro-batch 3`` or ``micro-batches 0 and 2-5``."""
    return f"micro-batch{'' if len(indices) == 1 else 'es'} {numbers_text(indices)}"


def steps_later(steps: int) -> str:
    """``in the next step`` or ``2 steps later``."""
    return "in the next step" if steps == 1 else f"{steps} steps later"
