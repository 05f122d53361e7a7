"""The schedules of a pipe: one for its steps and others for its calls, with the same placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from fxpipe.compiler import passes
from fxpipe.compiler.options import Options
from fxpipe.errors import InputError, PassError, VerificationError
from fxpipe.ir.recipe import Placement, find_recipe
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.runner import run_all

Purpose = Literal["step", "call", "infer"]
"""A training step with its loss, a differentiable call, or a call without gradients."""


class Timetable:
    """Makes and verifies each schedule once, with the tasks that the options add to it.

    Args:
        whole: the most micro-batches that a batch was split into so far.
    """

    def __init__(self, options: Options, whole: int = 0) -> None:
        self._options = options
        self._whole = max(options.microbatches or 0, whole)
        self._made: dict[tuple[int, Purpose], Schedule] = {}

    def schedule(self, microbatches: int, purpose: Purpose) -> Schedule:
        """Return the schedule of a step, or of a call.

        A short batch, such as the last of an epoch, has fewer micro-batches than a whole batch. If
        they are too few to overlap with the schedule's delay, its step ends with a flush.

        Raises:
            InputError: the schedule cannot serve the purpose.
            VerificationError: the schedule is wrong.
        """
        key = (microbatches, purpose)
        if key not in self._made:
            self._made[key] = self._written(microbatches, purpose)
        if purpose == "step":
            self._whole = max(self._whole, microbatches)
        schedule = self._made[key]
        if any(task.kind == "F" and task.batch for row in schedule.rows for task in row):
            raise InputError(
                f"schedule {schedule.name!r} runs forwards of an earlier batch, whose step has "
                "returned its loss already; let every forward belong to this step's batch"
            )
        if "C" in schedule.kinds and not self._options.clips:
            raise InputError(
                f"schedule {schedule.name!r} clips gradients, and nothing says by how much; give "
                "compile(..., clip_norm=1.0), or leave its C out"
            )
        if "O" in schedule.kinds and self._options.holds_saved:
            raise InputError(
                f"schedule {schedule.name!r} offloads what stages keep, which stays in memory of "
                f"its own with {self._options.holds_saved}; leave one of them out"
            )
        if purpose == "step" and not schedule.trains:
            raise InputError(
                f"schedule {schedule.name!r} has no backward, and a step needs one; train with "
                'another, such as "1f1b", and call the pipe for inference'
            )
        return schedule

    @property
    def place(self) -> Placement:
        """The function that places the stages on devices."""
        return self._options.recipe.placement

    def for_placing(self, microbatches: int) -> Schedule:
        """The schedule by whose memory needs the model is cut; it is neither run nor verified."""
        recipe = self._options.recipe
        schedule = recipe(len(self._options.devices), recipe.microbatches or microbatches)
        facts = self._modes("step") | {"replicated": False, "clips": False}
        for pass_ in passes.of(self._options, "schedule")[1:]:  # behind the one that writes it
            if pass_.runs(facts):
                schedule = pass_(facts | {"schedule": schedule})
        return schedule

    def changed(self, **options: Any) -> Timetable:
        """A timetable with some options changed."""
        return Timetable(replace(self._options, **options), self._whole)

    def _modes(self, purpose: Purpose) -> dict[str, Any]:
        recompute = self._options.recompute
        return {
            "recompute": recompute,
            "recomputes": recompute != "never" and purpose != "infer",
        }

    def _written(self, microbatches: int, purpose: Purpose) -> Schedule:
        recipe = self._options.recipe
        if purpose != "step":
            name = "gpipe" if purpose == "call" else "inference"
            recipe = find_recipe(name).placed(recipe.place)  # without copies
        copied = bool(recipe.copies(len(self._options.devices)))
        facts = {
            "recipe": recipe,
            "devices": len(self._options.devices),
            "microbatches": microbatches,
            "short": microbatches < self._whole,
            **self._modes(purpose),
            "replicated": (self._options.replicas > 1 and purpose != "infer") or copied,
            "clips": self._options.clips and purpose == "step",
        }
        try:
            schedule: Schedule = run_all(passes.of(self._options, "schedule"), facts)["schedule"]
        except PassError as error:
            if isinstance(error.__cause__, VerificationError):  # the fault is in the recipe
                raise error.__cause__ from None
            raise
        return schedule
