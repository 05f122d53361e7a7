"""``fxpipe.plan``: how to train a model on a cluster that need not be here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import product
from math import inf
from typing import Any, get_args

from torch import nn

from fxpipe.arguments import check_whole, read_example
from fxpipe.errors import InputError, PartitionError, near
from fxpipe.extensions.memory_limits.footprint import state_size
from fxpipe.extensions.paper.cluster import Cluster
from fxpipe.extensions.paper.device import Device
from fxpipe.extensions.paper.found import Ranking, Sharded, Way
from fxpipe.extensions.paper.layouts import Layout, layouts
from fxpipe.extensions.paper.predicting import Predictor, TrainingState
from fxpipe.extensions.paper.profile import Profile, Tensors
from fxpipe.extensions.planner.bounds import ALWAYS, NEVER, Modes
from fxpipe.extensions.planner.candidates import (
    Candidate,
    Predicted,
    best_of,
    evaluate,
    library_over,
    microbatch_counts,
)
from fxpipe.formatting import bytes_text
from fxpipe.ir.recipe import Placement, Recipe, find_recipe, one_each, round_robin, vee
from fxpipe.ir.schedule import Schedule
from fxpipe.runtime.weights.optimizer import GivenOptimizer

_FASTER = 0.98
"""How much less a batch has to take in larger micro-batches for these to be tried."""

_LONGEST = 1e30
"""More seconds than any step takes."""

_TWO = round_robin(2)

SHARDED: tuple[Sharded, ...] = get_args(Sharded)
"""What replicas may share, ever more."""

_CHUNKS = (2, 3, 4, 5, 6, 8, 10)
"""How many stages a device may have."""


def plan(
    model: nn.Module,
    cluster: Cluster | Device,
    *,
    batch: int,
    example: Any,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    tensors: Tensors | None = None,
    hidden: float = 0.0,
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    flush: bool = True,
    recompute: bool = True,
    offload: bool = False,
    sharding: str | Sequence[str] | None = None,
    held: tuple[float, float] | None = None,
    keep: int = 10,
) -> Ranking:
    """Rank the ways to train a model on a cluster. Nothing is run but the model's code, once for
    each size of micro-batches, on the meta device.

    Every way is a number of replicas × stages × devices that share a stage, a schedule with one or
    more stages on each device, a number of micro-batches, what replicas share, and which stages
    recompute or offload: those of the devices that would lack memory else.
    Times come from the FLOPs, bytes and shapes of the model's operations, see ``Device``; each step
    is simulated, with its transfers, sums over replicas and sums of tensor parallelism. Ways that
    cannot be the fastest, by a lower bound, are left out.

    Args:
        model: the model; it may be on the meta device.
        cluster: the devices.
        batch: the samples of a batch, over all replicas.
        example: inputs of some samples, as for ``compile``; they may be on the meta device.
        loss: as for ``compile``.
        optimizer: as for ``compile``; without one, Adam's state is counted.
        tensors: how submodules are divided over the devices of a host, by names with ``*`` for one
            part of a name: ``{"layers.*.attn": "columns/rows", "layers.*.mlp": "columns/rows",
            "head": "columns"}``. What "columns" divide reads whole values, whose gradients are
            summed; what "rows" divide gives sums. "sequence" divides what has no parameters to
            divide. Shapes alone are counted: the model is not changed.
        hidden: the share of those sums beside which devices compute.
        dp, tp, pp: replicas, devices of a stage, and devices (or groups of them) of a pipeline, if
            they are given.
        flush: whether each batch reads weights that all batches before have updated; else 2BW,
            whose weights are one version older.
        recompute: whether stages may recompute.
        offload: whether stages may offload what they keep.
        sharding: what replicas share, one of these or several to choose from: "never" for nothing,
            "zero1" for the optimizer's state, as ``Replicas(shard_optimizer=True)`` does, "zero2"
            for gradients, too, "zero3" also for weights, as ``Sharding`` does. By default "zero2"
            if there is an optimizer, which takes as long as "never", or "zero1" without a flush.
            "zero3" compiles for CPU devices only so far.
        held: bytes of gradients, and of the optimizer's state, for each parameter; by default as
            the parameters are, and as a trial step of the optimizer leaves it. (4, 12) for
            gradients, weights and Adam's states in 32 bits beside parameters in 16.
        keep: how many ways are returned.

    Returns:
        The ways, the fastest first. Each has ``seconds``, ``memory``, ``mfu`` and ``waits``, and
        ``mesh`` and ``options`` for ``compile``.

    Raises:
        InputError: an argument is wrong, the model does not run without data, or the batch is too
            small for all layouts.
        PartitionError: nothing fits into the devices' memory; says what would be needed.
    """
    if isinstance(cluster, Device):
        cluster = Cluster(cluster, 1)
    if not isinstance(cluster, Cluster):
        raise InputError(f"cluster is {cluster!r}; give a fxpipe.Cluster or a fxpipe.Device")
    check_whole("batch", batch, 1)
    check_whole("keep", keep, 1)
    if not 0 <= hidden <= 1:
        raise InputError(f"hidden is {hidden!r}; give a share from 0 to 1")
    args, kwargs = read_example(example)
    kwargs, targets = dict(kwargs), ()
    if "target" in kwargs:
        target = kwargs.pop("target")
        targets = target if isinstance(target, tuple) else (target,)
    places = list(layouts(cluster, divided=bool(tensors), dp=dp, tp=tp, pp=pp))
    places = [layout for layout in places if batch % layout.replicas == 0]
    if not places:
        raise InputError(
            f"a batch of {batch} cannot be shared equally by replicas on {cluster.devices} "
            "devices; give another batch, fewer devices, or pp="
        )
    longest = max(layout.stages for layout in places)
    profile = Profile(model, args, kwargs, loss, targets, tensors or {}, least=2 * longest)
    holding = _holding(model, optimizer, held)
    shared = _shared(sharding, optimizer is not None, flush)
    search = _Search(profile, batch, hidden, holding, keep, shared)
    search.flush, search.recompute, search.offload = flush, recompute, offload
    ways = search.all_of(places)
    given = {"loss": loss} if loss is not None else {}
    given |= {"optimizer": optimizer} if optimizer is not None else {}
    return Ranking(_ranked(ways, cluster, batch, longest), keep, given)


def _holding(
    model: nn.Module, optimizer: Callable[..., Any] | None, held: tuple[float, float] | None
) -> TrainingState:
    if held is not None:
        if len(held) != 2 or not all(isinstance(x, int | float) and x >= 0 for x in held):
            raise InputError(f"held is {held!r}; give bytes of gradients and of state, as (4, 12)")
        return TrainingState(*held)
    first = next(model.parameters(), None)
    itemsize = 4 if first is None else first.element_size()
    given = None if optimizer is None else GivenOptimizer(optimizer, model)
    return TrainingState(None, state_size(given) * itemsize)


def _shared(
    sharding: str | Sequence[str] | None, optimizer: bool, flush: bool
) -> Sequence[Sharded]:
    """What replicas may share."""
    if sharding is None:
        return ("zero2" if flush else "zero1",) if optimizer else ("never",)
    asked: Any = [sharding] if isinstance(sharding, str) else [*sharding]
    for each in asked or [""]:
        if each not in SHARDED:
            raise InputError(f"sharding is {sharding!r}: {near(each, SHARDED)}")
        if each != "never" and not optimizer:
            raise InputError(f"sharding is {sharding!r}; give optimizer=, too")
        if each in SHARDED[2:] and not flush:
            raise InputError(
                f"sharding is {sharding!r}, which does not divide several versions of the weights; "
                'give "zero1", or leave flush=False out'
            )
    return tuple(asked)


@cache
def _library(devices: int, place: Placement = one_each, flush: bool = True) -> Sequence[Recipe]:
    return library_over(devices, place, flush=flush)


class _Search:
    """Goes through the layouts, the most promising first."""

    flush = True
    recompute = True
    offload = False

    def __init__(
        self,
        profile: Profile,
        batch: int,
        hidden: float,
        holding: TrainingState,
        keep: int,
        shared: Sequence[Sharded],
    ) -> None:
        self._profile, self._batch, self._hidden = profile, batch, hidden
        self._holding, self._keep, self._shared = holding, keep, shared

    def all_of(self, places: Sequence[Layout]) -> list[Way]:
        """The best ways of each layout, but those slower than ``keep`` others that fit."""
        found: list[Way] = []
        fast: list[float] = []
        known: dict[Any, Any] = {}  # programs that were lowered, with a simulation of each
        made: dict[Any, Schedule] = {}
        tasks = []
        nearest: dict[tuple[int, int, Sharded], tuple[float, Predictor]] = {}
        for layout, sharding in product(places, self._shared):
            if layout.replicas == 1 and sharding != self._shared[0]:
                continue
            holding = replace(self._holding, sharding=sharding)
            given = self._profile, layout, self._batch, self._hidden, holding
            predictor = Predictor(*given, known, made)
            # of both orders of the same sizes, that whose exchanges take less
            key = layout.group, layout.stages, sharding
            cost = predictor.exchanging(self._counts(predictor)[0])
            if key not in nearest or cost < nearest[key][0]:
                nearest[key] = cost, predictor
        for _, predictor in nearest.values():
            for recipes in self._families(predictor.layout.stages):
                tasks.append((self._least(predictor), predictor, recipes))
        tasks.sort(key=lambda task: task[0])
        for least, predictor, recipes in tasks:
            worth = sorted(fast)[self._keep - 1] if len(fast) >= self._keep else inf
            if least >= worth:
                continue
            memory = predictor.device.memory
            for away in (False, True) if self.offload else (False,):
                best = self._best(predictor, recipes, away, worth)
                if best is None:
                    continue
                fits = best.fits((memory,) * predictor.layout.stages)
                found.append(self._way(predictor, best))
                if fits:
                    fast.append(best.seconds)
                    break  # offloading, too, would be slower
        return found

    def _families(self, devices: int) -> Iterator[Sequence[Recipe]]:
        """The schedules for each placement of stages."""
        if not self.flush:
            yield _library(devices, flush=False)
            return
        yield _library(devices)
        if devices > 1:
            yield _library(devices, vee)
            interleaved = find_recipe("interleaved-1f1b")
            for chunks in _CHUNKS:
                if chunks * devices <= len(self._profile.names):
                    recipes = [interleaved.placed(round_robin(chunks))]
                    yield recipes if chunks > 2 else _library(devices, _TWO)

    def _counts(self, predictor: Predictor) -> list[int]:
        """Numbers of micro-batches. Larger micro-batches that are no faster would only hold more,
        and leave devices idle."""
        counts = microbatch_counts(predictor.batch, predictor.layout.stages)
        found, before = list[int](), inf
        for count in reversed([count for count in counts if predictor.batch % count == 0]):
            seconds = count * sum(part.work for part in predictor.parts(count).parts)
            if seconds > _FASTER * before:
                break
            found.append(count)
            before = seconds
        return found

    def _least(self, predictor: Predictor) -> float:
        """The seconds of a step if no device ever waited."""
        devices = predictor.layout.stages
        return min(
            count * sum(part.work for part in predictor.parts(count).parts) / devices
            for count in self._counts(predictor)
        )

    def _best(
        self,
        predictor: Predictor,
        recipes: Sequence[Recipe],
        away: bool,
        worth: float,
    ) -> Predicted | None:
        """The best of some schedules; if none fits, what lacks the least."""
        devices = predictor.layout.stages
        limits = (predictor.device.memory,) * devices
        stages = recipes[0].stages(devices) if recipes else 0
        if not recipes or stages > len(self._profile.names):
            return None
        recompute: Modes | None = None if self.recompute else (NEVER,) * stages
        offload: Modes = (ALWAYS,) * stages if away else ()
        ways = list(product(recipes, self._counts(predictor)))
        predicted = evaluate(
            ways,
            recompute,
            limits,
            predictor,
            partial(predictor.predict, worth=worth),
            offload=offload,
            worth=min(worth, _LONGEST),  # not infinite: so what cannot fit is not predicted
            whole=True,
        )
        if fit := [each for each in predicted if each.fits(limits)]:
            return best_of(fit)
        bounds = list(predicted)
        for way in ways if not bounds else ():
            candidate = Candidate(*way, recompute or (ALWAYS,) * stages, offload)
            with suppress(InputError):
                seconds, peaks = predictor.seconds(candidate), predictor.peaks(candidate)
                if not Predicted(candidate, seconds, peaks).fits(limits):
                    bounds.append(Predicted(candidate, seconds, peaks))
        return min(bounds, key=lambda each: max(each.peaks), default=None)

    def _way(self, predictor: Predictor, best: Predicted) -> Way:
        layout, candidate = predictor.layout, best.candidate
        device = layout.cluster.device
        work = self._profile.flops * self._batch
        mfu = work / best.seconds / layout.cluster.devices / device.flops
        return Way(
            layout,
            candidate,
            predictor.samples(candidate.microbatches),
            best.seconds,
            max(best.peaks),
            mfu,
            predictor.waits(candidate),
            predictor.begins(candidate),
            predictor.sharding,
        )


def _ranked(ways: Sequence[Way], cluster: Cluster, batch: int, longest: int) -> list[Way]:
    """The ways, those that fit first, the fastest first.

    Raises:
        InputError: there are none.
        PartitionError: none fits.
    """
    if not ways:
        raise InputError(
            f"no layout of {cluster.devices} devices can take a batch of {batch}: pipelines have "
            f"up to {longest} devices, and the model has too few parts or the batch too few "
            "samples; give a larger batch, or dp= and pp="
        )
    memory = cluster.device.memory
    ranked = sorted(ways, key=lambda way: (way.memory > memory, way.seconds))
    if ranked[0].memory > memory:
        least = min(ways, key=lambda way: way.memory)
        raise PartitionError(
            f"nothing fits: a {cluster.device.name} has {bytes_text(memory)}, and the way that "
            f"needs the least takes {bytes_text(least.memory)} on the fullest device ({least}); "
            "give more devices, devices with more memory, tensors= to divide stages, or "
            "offload=True",
            limited=True,
        )
    return ranked
