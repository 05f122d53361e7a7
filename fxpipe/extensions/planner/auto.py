"""Choose a schedule by prediction, for ``schedule="auto"``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from fxpipe.compiler.compiled import Kind
from fxpipe.compiler.compiler import Compiler
from fxpipe.compiler.options import Options
from fxpipe.compiler.timetable import Timetable
from fxpipe.errors import InputError, PartitionError
from fxpipe.extensions.attributes import restoring
from fxpipe.extensions.planner.candidates import EXACT, Predicted
from fxpipe.extensions.planner.stages import FAMILIES, Stages, offload_of, with_modes
from fxpipe.formatting import bytes_text
from fxpipe.ir.recipe import Placement, Recipe, find_recipe, one_each
from fxpipe.ir.traced import Traced
from fxpipe.log import LOGGER
from fxpipe.passes.partition.measure import NodeCost
from fxpipe.runtime.batch import MicroBatches
from fxpipe.runtime.choice import ThreadChoice


def auto_schedule(
    name: str = "auto", families: Sequence[str] = FAMILIES
) -> tuple[Recipe, Callable[[Options, ThreadChoice], Compiler]]:
    """``schedule="auto"``: the fastest of the library's schedules with a flush. Until the first
    step has chosen one, calls have the stages of this recipe."""
    placement = PendingPlacement()
    recipe = replace(find_recipe(families[0]), name=name, placement=placement)
    return recipe, partial(AutoCompiler, placement=placement, families=families)


auto_two_bw = partial(auto_schedule, "auto-2bw", ("2bw",))
"""``schedule="auto-2bw"``: 2BW, which has no flush, with the fastest micro-batches."""


@dataclass(eq=False)
class PendingPlacement:
    """The places of stages that are not chosen yet: ``place`` changes until the stages are made."""

    place: Placement = one_each

    def __call__(self, devices: int) -> tuple[int | tuple[int, ...], ...]:
        return self.place(devices)


class AutoCompiler(Compiler):
    """A compiler that chooses the schedule at the first step, and again for a larger batch.

    The model is traced, measured and cut for a schedule that keeps few micro-batches. With the
    times of the stages' operations all candidates are simulated. If not even the best one keeps the
    memory limits, the model is cut anew with the missing bytes left free, as for any schedule. If
    devices would idle, the model is also cut into two stages for each device.

    Args:
        placement: the placement in the recipe of ``options``; it follows the chosen schedule.
        families: the schedules whose stages the model is cut into.
    """

    _size = 0  # of the largest batch that a schedule was chosen for
    _stages: Stages | None = None

    def __init__(
        self,
        options: Options,
        choice: ThreadChoice,
        placement: PendingPlacement,
        families: Sequence[str] = FAMILIES,
    ) -> None:
        super().__init__(options, choice)
        self._pending, self.families = placement, families

    @property
    def _parts(self) -> Sequence[object]:
        return (*super()._parts, self._pending)

    def _follow(self, timetable: Timetable) -> None:
        """Make the schedules of this timetable from now on."""
        self.timetable = self._placement.timetable = timetable
        if timetable.place is not self._pending:
            self._pending.place = timetable.place
        self.memo.forget("call", "program")

    def decides(self, micro: MicroBatches) -> bool:
        """Whether a schedule has to be chosen for this batch.

        Replicas choose together and only once: a replica does not know that another one's batch
        is larger than before.
        """
        return self._size == 0 if self.options.replicas > 1 else micro.batch.size > self._size

    def decide(self, micro: MicroBatches, *, updates: bool) -> int:
        """Choose a schedule for batches of at most this size; returns the number of micro-batches.

        Raises:
            PartitionError: as ``best``.
        """
        best = self.best(micro, updates=updates)
        LOGGER.info('schedule="%s" takes %s', self.options.decides, best)
        return best.candidate.microbatches

    def best(self, micro: MicroBatches, *, updates: bool) -> Predicted:
        """Choose a schedule for batches of at most this size.

        Raises:
            PartitionError: no candidate is predicted to keep the memory limits; says how many bytes
                are missing.
        """
        options, size = self.options, micro.batch.size
        if options.replicas > 1:
            size = min(options.group.exchange("the samples of a batch", size))
        count = min(size, options.microbatches or 4 * len(options.devices))
        before, cut = self.timetable, bool(self.loads)
        recompute = "always" if options.recompute == "never" else options.recompute
        devices, asked = len(options.devices), offload_of(options)
        by_stage = not isinstance(options.recompute, str) or (
            asked is not None and not isinstance(asked.modes, str)
        )
        families = [*map(find_recipe, self.families)]
        if cut:
            families = [recipe for recipe in families if recipe.place(devices) == options.placement]
        elif devices == 1 or by_stage:
            families = families[:1]  # modes by stage are for one stage on each device
        attempts = [(before.changed(recipe=families[0], recompute=recompute), count)]
        if not self._placement.judged or not cut:
            holds_least = families[0] if families[0].delay else find_recipe("naive")
            least = before.changed(recipe=holds_least, recompute=recompute)
            attempts.append((least, options.microbatches or size))
        self._nodes: dict[int, tuple[Traced, Mapping[str, NodeCost]]] = {}
        self._fixed = (None, True) if options.microbatches else (False, True)
        decide = partial(self._decided, micro=micro, size=size, updates=updates)
        too_large: list[Predicted] = []
        best: Predicted | None = None
        with self.compiling(f'{type(options.model).__name__} for schedule="auto"'):
            for timetable, parts in attempts:
                try:
                    best = decide(timetable, parts, too_large=too_large)
                    break
                except PartitionError as error:
                    why = error
                    if self._size == 0:
                        self._forget()
                        self._placement.forget()
            for recipe in families[1:]:
                if best is None or (self._stages and self._stages.may_be_beaten(best.seconds)):
                    timetable = before.changed(recipe=recipe, recompute=recompute)
                    best = self._better(best, partial(decide, timetable, count), too_large)
            if best is None:
                self._follow(before)
                if not too_large:
                    raise why
                limits = self._placement.limits
                nearest = min(too_large, key=lambda predicted: sum(predicted.over(limits)))
                raise PartitionError(_refusal(nearest, limits, options.names)) from why
            choice = best.candidate
            self._follow(
                before.changed(
                    recipe=choice.recipe,
                    recompute=choice.recompute,
                    extensions=with_modes(options.extensions, choice.offload),
                )
            )
        self._size = size
        return best

    def _better(
        self,
        best: Predicted | None,
        decide: Callable[..., Predicted],
        too_large: list[Predicted],
    ) -> Predicted | None:
        """Return the best candidate over other stages if it is faster than the best so far; else
        go back to the stages of the best so far, and return it."""
        restore = restoring(self._parts)
        self._forget()
        self._placement.forget()
        with suppress(InputError, PartitionError):  # the model may have too few operations
            worth = math.inf if best is None else best.seconds / EXACT
            other = decide(too_large=too_large, worth=worth)
            if best is None or other.seconds * EXACT < best.seconds:
                return other
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
        too_large: list[Predicted],
        worth: float = math.inf,
    ) -> Predicted:
        """Cut the model for a timetable, and return the best candidate over these stages.

        Args:
            too_large: is extended by the best candidates that exceed the memory limits.
            worth: a candidate whose step takes longer is of no use.

        Raises:
            PartitionError: no candidate keeps the limits.
            InputError: the stages run no candidate that is of use.
        """
        limits = self._placement.limits
        kind = Kind("step", updates, outputs=False)
        micro = micro.batch.in_parts(count, micro.replica)
        while True:
            self._follow(timetable)
            stages = Stages(self, limits, self._compile(micro, kind), size, updates, self._nodes)
            choice = stages.fastest(worth)
            if not choice.fits(limits):
                too_large.append(choice)
                if self._placement.judged:
                    raise PartitionError("the stages are made, and stay as they are")
            if self._placement.judged or self._placement.keeps_limits(choice.peaks):
                count = choice.candidate.microbatches
                self._placement.costs = stages.costs(count)
                self._placement.samples = stages.samples(count)
                self._stages = stages
                return choice
            self._forget()


def _refusal(nearest: Predicted, limits: Sequence[float], names: Sequence[str]) -> str:
    """The message that nothing fits: what the candidate that exceeds the limits least lacks, and
    which limits would be enough for it."""
    parts = [
        f"{name} is predicted to hold at least {bytes_text(peak)} in a step and may take "
        f"{bytes_text(limit)}, {bytes_text(missing)} too little"
        for name, peak, limit, missing in zip(
            names, nearest.peaks, limits, nearest.over(limits), strict=True
        )
        if missing
    ]
    enough = [
        None if limit == math.inf else math.ceil(max(limit, peak))
        for limit, peak in zip(limits, nearest.peaks, strict=True)
    ]
    return (
        f"{'; '.join(parts)}; memory_limits={enough} is predicted to be enough, with "
        f"{nearest.candidate}; or give more devices or smaller batches"
    )
