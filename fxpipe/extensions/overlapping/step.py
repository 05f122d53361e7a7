"""Train on batches that overlap: each joins those that are in flight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from fxpipe.compiler.compiled import Compiled
from fxpipe.engine import Engine
from fxpipe.errors import InputError
from fxpipe.extensions.overlapping.loss import PendingLoss
from fxpipe.extensions.overlapping.run import OverlappingRun
from fxpipe.extensions.overlapping.versions import VersionedWeights
from fxpipe.runtime.batch import MicroBatches
from fxpipe.runtime.host import Job, Watch, draw_seed
from fxpipe.runtime.weights.progress import Progress


def step(
    engine: Engine,
    compiled: Compiled,
    micro: MicroBatches,
    *,
    with_output: bool,
    watch: Watch | None = None,
) -> Any:
    """Train on a batch that overlaps with others; the loss that it returns may come later. See
    ``Engine.step``."""
    traced = compiled.traced
    # the caller may overwrite the batch before all of it is read
    host = engine.host(compiled, copied_batch(micro), with_output=with_output, watch=watch)
    engine.progress.optimizers_of(compiled.plan, submits=True)
    if not engine.updates:
        raise InputError(
            f"schedule {compiled.schedule.name!r} updates the weights while batches are in "
            "flight, and there is no optimizer; give compile(..., optimizer=...)"
        )
    if not engine.joins(compiled):
        engine.flush()
    run, clipping = engine.in_flight, engine.clipping
    if run is None or run.failed:
        versions = _versions(engine, compiled)
        run = engine.run(OverlappingRun, compiled, versions, first=versions.slowest)
        engine.in_flight = run
    number = run.count
    if clipping is not None:
        # for later batches it may not be decided yet whether they update
        clipping.settle(number - 2 - compiled.schedule.depth)
    assert traced.loss is not None
    dtype = compiled.plan.specs[traced.loss].dtype
    host.weigh_loss(dtype, 1.0 if clipping is None else clipping.begin(number))
    if traced.seeded:
        draw_seed()
    lock = engine._lock
    loss = PendingLoss(dtype, lambda: lock.call(run.wait_for, [number]))
    job = Job(compiled.kernels, host, clipping, compiled.specs)

    def arrived() -> None:
        loss.come(host.loss())
        if watch is not None:
            watch.look(host)

    run.step(job, arrived, whole=with_output)
    engine.kept = run.peak_kept
    engine.logged = host.logged() if traced.logged else None
    return (loss.read(), host.output()) if with_output else loss


def _versions(engine: Engine, compiled: Compiled) -> VersionedWeights:
    """The versions of the weights, while no batch is in flight."""
    progress, traced = engine.progress, compiled.traced
    changed = any(engine.group.exchange("changes", progress.changed))
    versions: VersionedWeights | None = progress.versions
    if versions is None:
        progress.versions = versions = _first(progress, compiled, changed)
        progress.older = None
    else:
        versions.follow(compiled.schedule.delays)
    state = progress.state_of(traced)
    versions.open(compiled.plan.stages, state, traced.deferred, changed=changed)
    return versions


def _first(progress: Progress, compiled: Compiled, changed: bool) -> VersionedWeights:
    """The first versions. ``changed`` tells whether the user has changed parameters in any process
    since a checkpoint that has older ones."""
    parameters = dict(progress.model.named_parameters(remove_duplicate=False))
    versions = VersionedWeights(
        [
            {a.target: parameters[a.target] for a in stage.parameters if progress.owns(index)}
            for index, stage in enumerate(compiled.plan.stages)
        ],
        progress.optimizers_of(compiled.plan),
        compiled.schedule.delays,
        owns=progress.owns,
    )
    if progress.older is None or changed:
        versions.restart(progress.batches)
    else:
        progress.older.begin(versions)
    return versions


def copied_batch(micro: MicroBatches) -> MicroBatches:
    """A copy that stays the same when the caller changes the tensors of the batch."""
    leaves = [x.detach().clone() if isinstance(x, Tensor) else x for x in micro.batch.leaves]
    batch = replace(micro.batch, leaves=tuple(leaves))
    return replace(micro, batch=batch, leaves=batch.split(len(micro)))
