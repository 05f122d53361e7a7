"""Decide what ``schedule="search"`` and ``schedule="auto"`` leave open, by prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from fxpipe.compiler.candidates import FAMILIES, Stages
from fxpipe.compiler.compiled import Kind, restoring
from fxpipe.compiler.compiler import Compiler, Rehearse
from fxpipe.compiler.options import Options
from fxpipe.compiler.timetable import Timetable
from fxpipe.errors import InputError, PartitionError
from fxpipe.formatting import bytes_text
from fxpipe.ir.recipe import Placement, find_recipe, one_each
from fxpipe.log import noted
from fxpipe.planner.candidates import EXACT, Predicted
from fxpipe.runtime.batch import MicroBatches
from fxpipe.runtime.choice import Choice


@dataclass(eq=False)
class PendingPlacement:
    """Where the stages are; it changes until they are made."""

    place: Placement = one_each

    def __call__(self, devices: int) -> tuple[int | tuple[int, ...], ...]:
        return self.place(devices)


class AutoCompiler(Compiler):
    """A compiler that decides at the first step, and again at a larger batch, if it is alone.

    The model is traced, measured and cut for a schedule that keeps few micro-batches. Some steps
    are rehearsed over these stages, and with their times all candidates are simulated as
    ``Pipeline.simulate`` does it. Where not even the best one keeps the memory limits, the model is
    cut anew, as for any schedule, with what is missing left free. Where devices would be idle, it
    is also cut into two stages for each, and the best over these is rehearsed if it is predicted to
    be faster.
    """

    _size = 0
    _stages: Stages | None = None

    def __init__(self, options: Options, choice: Choice, where: PendingPlacement) -> None:
        """Nothing is decided yet; the recipe of the options has its stages ``where`` it is decided,
        which is changed."""
        super().__init__(options, choice)
        self._where = where

    @property
    def _parts(self) -> Sequence[object]:
        return (*super()._parts, self._where)

    def _follow(self, timetable: Timetable) -> None:
        """Make the schedules of this timetable from now on."""
        self.timetable = self._placement.timetable = timetable
        if timetable.place is not self._where:
            self._where.place = timetable.place
        self._programs.clear()
        self._known.clear()

    def decides(self, micro: MicroBatches) -> bool:
        """Whether a step of this batch is still to be decided on.

        Replicas decide together, and no one knows of another that its batch is larger than before.
        """
        return self._size == 0 if self.options.replicas > 1 else micro.batch.size > self._size

    def decide(self, micro: MicroBatches, *, updates: bool, rehearse: Rehearse) -> int:
        """Decide on steps of batches of at most this size; returns the number of micro-batches.

        Raises:
            PartitionError: nothing is predicted to keep the memory limits; it has what is missing.
        """
        options, size = self.options, micro.batch.size
        if options.replicas > 1:
            size = min(options.group.exchange("the samples of a batch", size))
        count = min(size, options.microbatches or 4 * len(options.devices))
        before, made, auto = self.timetable, self.verdict is not None, options.decides == "auto"
        recompute = "always" if auto and options.recompute == "never" else options.recompute
        devices = len(options.devices)
        families = [find_recipe(names[0]) for names in FAMILIES]
        if made:
            families = [each for each in families if each.place(devices) == options.placement]
        elif not auto or devices == 1 or {type(options.recompute), type(options.offload)} != {str}:
            families = families[:1]  # modes by stage are for one stage on each device
        ways = [(before.changed(recipe=families[0], recompute=recompute), count)]
        if auto:
            if not self._placement.judged or not made:
                least = before.changed(recipe=find_recipe("naive"), recompute=recompute)
                ways.append((least, options.microbatches or size))
            self._fixed = (None, True) if options.microbatches else (False, True)
        decide = partial(self._decided, micro=micro, size=size, updates=updates, rehearse=rehearse)
        nearest: list[Predicted] = []
        found: Predicted | None = None
        with self._compiling(f'{type(options.model).__name__} for schedule="{options.decides}"'):
            for timetable, count in ways:
                try:
                    found = decide(timetable, count, nearest=nearest)
                    break
                except PartitionError as error:
                    why = error
                    if self._size == 0:
                        self._forget()
                        self._placement.forget()
            for family in families[1:]:
                if found is None or (self._stages and self._stages.may_be_beaten(found.seconds)):
                    timetable = before.changed(recipe=family, recompute=recompute)
                    found = self._better(found, partial(decide, timetable, ways[0][1]), nearest)
            if found is None:
                self._follow(before)
                if not nearest:
                    raise why
                limits = self._placement.limits
                least_of_all = min(nearest, key=lambda each: sum(each.over(limits)))
                raise PartitionError(_refusal(least_of_all, limits, options.names)) from why
            choice = found.candidate
            self._follow(
                before.changed(
                    recipe=choice.recipe,
                    recompute=choice.recompute,
                    offload=choice.offload or options.offload,
                )
            )
        self._size = size
        noted(f'schedule="{options.decides}" takes {found}')
        return choice.microbatches

    def _better(
        self,
        best: Predicted | None,
        decide: Callable[..., Predicted],
        nearest: list[Predicted],
    ) -> Predicted | None:
        """The best over other stages, if it is faster than the best so far; else what was made for
        that stays."""
        restore = restoring(self._parts)
        self._forget()
        self._placement.forget()
        with suppress(InputError, PartitionError):  # the model may have too few operations
            found = decide(nearest=nearest, best=best, like=self._stages)
            if best is None or found.seconds * EXACT < best.seconds:
                return found
        restore()
        return best

    def _decided(
        self,
        timetable: Timetable,
        count: int,
        *,
        micro: MicroBatches,
        size: int,
        updates: bool,
        rehearse: Rehearse,
        nearest: list[Predicted],
        best: Predicted | None = None,
        like: Stages | None = None,
    ) -> Predicted:
        """The best candidate over stages that are made for a timetable; what exceeds limits goes
        to ``nearest``.

        Args:
            best: the best over other stages; what cannot be faster need not be rehearsed.
            like: those stages, where they were rehearsed.

        Raises:
            PartitionError: none keeps the limits.
        """
        options, limits = self.options, self._placement.limits
        kind = Kind("step", updates, outputs=False)
        micro = micro.batch.in_parts(count, micro.replica)
        while True:
            self._follow(timetable)
            stages = Stages(self, limits, self._compile(micro, kind), size, updates)
            searches = options.decides == "search"
            if searches or self._placement.judged:  # else it may be cut anew
                stages.learn(rehearse, like)
            found = stages.searched() if searches else stages.fastest()
            if not found.fits(limits):
                nearest.append(found)
                if self._placement.judged:
                    raise PartitionError("the stages are made, and stay as they are")
            if self._placement.judged or self._placement.keeps_limits(found.peaks):
                if not stages.rehearsed:
                    stages.learn(rehearse, like)
                    found = stages.fastest()
                if not searches and (best is None or found.seconds * EXACT < best.seconds):
                    found = stages.confirmed(found, rehearse)
                self._placement.costs = stages.costs(found.candidate.microbatches)
                self._stages = stages
                return found
            self._forget()


def _refusal(least: Predicted, limits: Sequence[float], names: Sequence[str]) -> str:
    """What is missing where the candidate runs that lacks the least, and what would be enough."""
    parts = [
        f"{name} is predicted to hold at least {bytes_text(peak)} in a step and may take "
        f"{bytes_text(most)}, {bytes_text(lacks)} too little"
        for name, peak, most, lacks in zip(
            names, least.peaks, limits, least.over(limits), strict=True
        )
        if lacks
    ]
    enough = [
        None if most == math.inf else math.ceil(max(most, peak))
        for most, peak in zip(limits, least.peaks, strict=True)
    ]
    return (
        f"{'; '.join(parts)}; memory_limits={enough} is predicted to be enough, with "
        f"{least.candidate}; or give more devices or smaller batches"
    )
