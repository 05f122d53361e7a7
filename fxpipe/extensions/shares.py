"""Warn of a stage that takes a larger share of a step than its operations took when they were
measured, as after a cut on a busy machine, and name a cut by what was measured in steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from weakref import WeakKeyDictionary

from torch import nn

from fxpipe.compiler.compiled import Compiled
from fxpipe.errors import PartitionError
from fxpipe.extensions.tasks import Tasks
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced
from fxpipe.log import LOGGER
from fxpipe.passes.partition.balance import cut_at
from fxpipe.pipeline import Pipeline

LARGER = 1.3
"""A stage is warned of if its share of a step is this many times the predicted one."""

_SAMPLES = 4
"""How often each task has to be timed; the least time counts, as where operations are measured."""

_told: WeakKeyDictionary[Pipeline, bool] = WeakKeyDictionary()
"""The pipes that were warned of."""


def tell_shares(pipe: Pipeline, compiled: Compiled, tasks: Tasks) -> None:
    """Warn, once for a pipe, of the stage whose share of a step exceeds the predicted one the most,
    if it slows the pipe: it takes longer than the mean of the stages."""
    if pipe in _told or pipe._group.rank or not (spent := _spent(compiled.plan, tasks)):
        return
    costs = [stage.costs for stage in compiled.plan.stages]
    predicted = [0.0 if cost is None else cost.forward + cost.backward for cost in costs]
    if not all(predicted):
        return
    whole, all_ = sum(predicted), sum(spent)
    slow = [stage for stage, time in enumerate(spent) if time * len(spent) > all_]
    ratios = {stage: (spent[stage] / all_) / (predicted[stage] / whole) for stage in slow}
    stage = max(ratios, key=ratios.__getitem__, default=0)
    if ratios.get(stage, 0.0) <= LARGER:
        return
    _told[pipe] = True
    scaled = {
        name: seconds * spent[cost_of] / predicted[cost_of]
        for cost_of, cost in enumerate(costs)
        for name, seconds in (cost.nodes.items() if cost is not None else ())
    }
    names, slowest = even_names(pipe._model, compiled.traced, scaled, len(spent))
    LOGGER.warning(
        "stage %d takes %.1f %% of the time of all stages, and %.1f %% were predicted by its "
        "operations, which were measured one by one when the model was cut; %s",
        stage,
        100 * spent[stage] / all_,
        100 * predicted[stage] / whole,
        f"with compile(..., partition={names}) the slowest stage is expected to take "
        f"{slowest / max(spent):.2f} times as long as now"
        if names and slowest < max(spent) / 1.05
        else "no cut at submodules is expected to be much better",
    )


def _spent(plan: Plan, tasks: Tasks) -> list[float]:
    """Stage → the seconds of a micro-batch; empty if a task was not timed often enough."""
    spent = []
    for stage in plan.stages:
        times = {letter: tasks.get((letter, stage.index), ()) for letter in "FBIW"}
        back = "B" if times["B"] else "IW"
        if len(times["F"]) < _SAMPLES or any(0 < len(times[x]) < _SAMPLES for x in back):
            return []
        spent.append(sum(min(times[letter], default=0.0) for letter in ("F", *back)))
    return spent


def even_names(
    model: nn.Module, traced: Traced, seconds: Mapping[str, float], stages: int
) -> tuple[list[str], float]:
    """The submodules at which stages begin so that the slowest takes the least, and its seconds; no
    names if there are too few such submodules.

    Args:
        seconds: node of the graph → its time.
    """
    before: dict[float, str] = {}  # the seconds before a cut → the submodule at which it is
    for name, _ in model.named_modules():
        with suppress(PartitionError):
            first = cut_at(traced, 2, [name], model).nodes
            ahead = sum(seconds.get(node, 0.0) for node, stage in first.items() if not stage)
            before.setdefault(ahead, name)
    ends = [*sorted(before), sum(seconds.values())]

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """The slowest of so many stages from an end on, 0 for the begin, and where they end."""
        begin = ends[start - 1] if start else 0.0
        if left == 1:
            return ends[-1] - begin, ()
        tried = []
        for end in range(start, len(ends) - left + 1):
            slowest, cuts = best(end + 1, left - 1)
            tried.append((max(ends[end] - begin, slowest), (end, *cuts)))
        return min(tried)

    if len(before) < stages - 1:
        return [], sum(seconds.values())
    slowest, cuts = best(0, stages)
    return [before[ends[cut]] for cut in cuts], slowest
