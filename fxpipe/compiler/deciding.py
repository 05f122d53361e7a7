"""Decide what ``schedule="search"`` and ``schedule="auto"`` leave open, by prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxpipe.compiler.candidates import Stages
from fxpipe.compiler.compiled import Kind
from fxpipe.compiler.compiler import Compiler, Rehearse
from fxpipe.compiler.timetable import Timetable
from fxpipe.errors import PartitionError
from fxpipe.ir.recipe import find_recipe
from fxpipe.log import noted
from fxpipe.planner.candidates import (
    Predicted,
)
from fxpipe.runtime.batch import MicroBatches
from fxpipe.words import bytes_text

_FRUGAL = find_recipe("zb-h1")
"""The stages are made for it first: it keeps few micro-batches, and has backwards in halves."""


class Deciding(Compiler):
    """A compiler that decides at the first step, and again at a larger batch.

    The model is traced, measured and cut for a schedule that keeps few micro-batches. Some steps
    are rehearsed over these stages, and with their times all candidates are simulated as
    ``Pipeline.simulate`` does it. Where not even the best one keeps the memory limits, the model is
    cut anew, as for any schedule, with what is missing left free.
    """

    _size = 0

    def _follow(self, timetable: Timetable) -> None:
        """Make the schedules of this timetable from now on."""
        self.timetable = self._placement.timetable = timetable
        self._programs.clear()
        self._known.clear()

    def decides(self, micro: MicroBatches) -> bool:
        """Whether a step of this batch is still to be decided on."""
        return micro.batch.size > self._size

    def decide(self, micro: MicroBatches, *, updates: bool, rehearse: Rehearse) -> int:
        """Decide on steps of batches of at most this size; returns the number of micro-batches.

        Raises:
            PartitionError: nothing is predicted to keep the memory limits; it has what is missing.
        """
        options, size = self.options, micro.batch.size
        if options.replicas > 1:
            size = min(options.group.exchange("the samples of a batch", size))
        count = min(size, options.microbatches or 4 * len(options.devices))
        before, recompute = self.timetable, options.recompute
        ways = [(before.changed(recipe=_FRUGAL), count)]
        if options.decides == "auto":
            again = "always" if recompute == "never" else recompute
            ways = [(before.changed(recipe=_FRUGAL, recompute=again), count)]
            if not self._placement.judged or self.verdict is None:
                least = find_recipe("naive")
                most = options.microbatches or size
                ways.append((before.changed(recipe=least, recompute=again), most))
            self._fixed = (None, True) if options.microbatches else (False, True)
        nearest: list[Predicted] = []
        with self._compiling(f'{type(options.model).__name__} for schedule="{options.decides}"'):
            for timetable, count in ways:
                try:
                    found = self._decided(timetable, micro, count, size, updates, rehearse, nearest)
                    break
                except PartitionError as error:
                    why = error
                    if self._size == 0:
                        self._forget()
                        self._placement.forget()
            else:
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

    def _decided(
        self,
        timetable: Timetable,
        micro: MicroBatches,
        count: int,
        size: int,
        updates: bool,
        rehearse: Rehearse,
        nearest: list[Predicted],
    ) -> Predicted:
        """The best candidate over stages that are made for a timetable; what exceeds limits goes
        to ``nearest``.

        Raises:
            PartitionError: none keeps the limits.
        """
        options, limits = self.options, self._placement.limits
        kind = Kind("step", updates, (False,) * len(micro.batch.leaves), False)
        micro = micro.batch.in_parts(count, micro.replica)
        while True:
            self._follow(timetable)
            stages = Stages(self, limits, self._compile(micro, kind), size, updates)
            searches = options.decides == "search"
            if searches or self._placement.judged:  # else it may be cut anew
                stages.rehearse(rehearse)
            found = stages.searched() if searches else stages.fastest()
            if not found.fits(limits):
                nearest.append(found)
                if self._placement.judged:
                    raise PartitionError("the stages are made, and stay as they are")
            if self._placement.judged or self._placement.keeps_limits(found.peaks):
                if not stages.rehearsed:
                    stages.rehearse(rehearse)
                    found = stages.fastest()
                self._placement.costs = stages.costs(found.candidate.microbatches)
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
