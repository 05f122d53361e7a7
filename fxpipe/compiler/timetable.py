"""The schedules of a pipe: that of its steps, and those of its calls over the same placement."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Literal

from fxpipe.errors import InputError
from fxpipe.ir.recipe import Recipe, find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.schedule.add_clip import add_clip
from fxpipe.passes.schedule.add_recompute import Recompute, add_recompute
from fxpipe.passes.schedule.end_with_flush import end_with_flush

Purpose = Literal["step", "call", "infer"]
"""A training step with its loss, a differentiable call, or a call without gradients."""

RecomputeLike = Recompute | Sequence[Recompute] | Mapping[int, Recompute]


class Timetable:
    """Makes each schedule once, verified, with what the pipe's options add to it."""

    def __init__(
        self,
        recipe: Recipe,
        devices: int,
        *,
        microbatches: int | None = None,
        clips: bool = False,
        recompute: RecomputeLike,
    ) -> None:
        """No schedule is made yet.

        Args:
            recipe: the schedule of steps, which places the stages.
            devices: how many.
            microbatches: into how many a whole batch is split; None for the most so far.
            clips: whether every stage clips before it updates.
            recompute: which stages run their forwards again.
        """
        self.recipe = recipe
        self._devices = devices
        self._whole = microbatches or 0
        self._clips = clips
        self._recompute = recompute
        self._made: dict[tuple[int, Purpose], Schedule] = {}

    def schedule(self, microbatches: int, purpose: Purpose) -> Schedule:
        """The schedule of a step, or of a call.

        A short batch, as the last of an epoch may be, has fewer micro-batches than a whole one:
        where they are too few to overlap with the schedule's delay, its step ends with a flush.

        Raises:
            InputError: it cannot serve the purpose.
            VerificationError: it is wrong.
        """
        key = (microbatches, purpose)
        if key not in self._made:
            schedule = self._recipe(purpose)(self._devices, microbatches)
            if microbatches < self._whole and schedule.overlaps:
                needed = schedule.versions().smallest
                if any(map(operator.lt, schedule.delays, needed)):
                    schedule = end_with_flush(schedule)
            schedule.verify()
            if purpose != "infer" and not schedule.kinds & {"R"}:
                schedule = self.recomputing(schedule).verify()
            clips = self._clips and purpose == "step"
            self._made[key] = add_clip(schedule).verify() if clips else schedule
        if purpose == "step":
            self._whole = max(self._whole, microbatches)
        schedule = self._made[key]
        if any(task.kind == "F" and task.batch for row in schedule.rows for task in row):
            raise InputError(
                f"schedule {schedule.name!r} runs forwards of an earlier batch, whose step has "
                "returned its loss already; let every forward belong to this step's batch"
            )
        if "C" in schedule.kinds and not self._clips:
            raise InputError(
                f"schedule {schedule.name!r} clips gradients, and nothing says by how much; give "
                "compile(..., clip_norm=1.0), or leave its C out"
            )
        if purpose == "step" and not schedule.trains:
            raise InputError(
                f"schedule {schedule.name!r} has no backward, and a step needs one; train with "
                'another, such as "1f1b", and call the pipe for inference'
            )
        return schedule

    def changed(
        self, *, recipe: Recipe | None = None, recompute: RecomputeLike | None = None
    ) -> Timetable:
        """Another one, of the same options but for these."""
        return Timetable(
            recipe or self.recipe,
            self._devices,
            microbatches=self._whole,
            clips=self._clips,
            recompute=self._recompute if recompute is None else recompute,
        )

    def recomputing(self, schedule: Schedule) -> Schedule:
        """A schedule with the recomputes that the pipe's options add."""
        return add_recompute(schedule, _modes(self._recompute, schedule.stages))

    def _recipe(self, purpose: Purpose) -> Recipe:
        if purpose == "step":
            return self.recipe
        name = "gpipe" if purpose == "call" else "inference"
        return find_recipe(name).placed(self.recipe.placement)


def _modes(given: RecomputeLike, stages: int) -> list[Recompute]:
    """Stage → whether it recomputes."""
    if isinstance(given, str):
        return [given] * stages
    if isinstance(given, Mapping):
        return [given.get(stage, "never") for stage in range(stages)]
    return list(given)
