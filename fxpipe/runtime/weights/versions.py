"""Several versions of the weights, for steps that overlap without a flush.

PipeDream-2BW's double buffering (arXiv 2006.09503), for any delay d: batch t reads version
max(t − d, 0), and the update from batch t writes version t + 1. A stage has d + 1 copies of its
weights, and an update overwrites the one whose version no batch will read again. If the
micro-batches of a stage have different delays, d is the greatest of them.

After a failure all stages roll back to the newest version that every stage has. An update that
would overwrite that version therefore waits until the slowest stage has the next one, so d + 1
copies are enough. With m micro-batches and p stages it waits only if d · m = p − 1, never if d · m
is greater (the paper asks for m ≥ p). The wait costs no time in the long run, as the next forward
of any stage needs the slowest stage's update anyway. If the wait might cause a deadlock (see
``fxpipe.verify.versions``), or if one thread runs all devices, the update does not wait, and one
more version may be kept while batches are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.ir.plan import Stage
from fxpipe.runtime.weights.live import Weights
from fxpipe.runtime.weights.optimizer_state import frozen
from fxpipe.runtime.weights.prediction import check_predictable
from fxpipe.runtime.weights.sharding import ShardedStage, Shards
from fxpipe.runtime.weights.stage_weights import Buffers, History, StageWeights
from fxpipe.torchtools import moments
from fxpipe.torchtools.moments import DeferredNorm


class VersionedWeights(Weights):
    """The parameters of all stages, in as many versions as the schedule's delay requires.

    If delays differ, as in PipeDream without vertical sync, a stage may be ahead of the slowest by
    more than its delay. It then keeps more versions than its batches read, for a roll-back.

    Attributes:
        base: the oldest version that any stage can read.
    """

    def __init__(
        self,
        parameters: Sequence[Mapping[str, nn.Parameter]],
        optimizers: Sequence[Optimizer | None],
        delays: Sequence[int],
        *,
        predicts: bool = False,
        awaits: bool = False,
        owns: Callable[[int], bool] = lambda stage: True,
        others: Sequence[int] = (),
        shards: Mapping[Optimizer, Shards] = MappingProxyType({}),
    ) -> None:
        """Take the current parameters as version 0.

        Args:
            parameters: stage → name in the model → parameter, for the stages of this process.
            optimizers: stage → its optimizer.
            delays: stage → by how many versions its batches read behind the newest.
            predicts: whether batches read predicted weights instead.
            awaits: whether an update may wait for another stage's, see ``Versions.awaited``.
            owns: whether this process updates a stage. Of other processes' stages only the number
                of the newest version is known, see ``note``.
            others: the numbers of the other replicas, of which also only that is known.
            shards: optimizer → the parts of parameters that it trains, if it is sharded.

        Raises:
            InputError: weights are to be predicted, and an optimizer has no momentum.
        """
        if predicts:
            for optimizer in optimizers:
                if optimizer is not None:
                    check_predictable(optimizer)
        super().__init__()
        self.base = 0
        self._stages = [
            StageWeights(named, optimizer, delay, predicts)
            if optimizer is None or (parts := shards.get(optimizer)) is None
            else ShardedStage(named, optimizer, delay, parts)
            for named, optimizer, delay in zip(parameters, optimizers, delays, strict=True)
        ]
        for stage in self._stages:
            stage.restart(0)
        # another replica → stage → its newest version there
        self._elsewhere = {replica: [0] * len(self._stages) for replica in others}
        self._groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._awaits = awaits
        self._own = [stage for index, stage in enumerate(self._stages) if owns(index)]
        self._updated: Callable[[int, int], None] = lambda stage, version: None

    @property
    def slowest(self) -> int:
        """The newest version that every stage has, in all replicas."""
        here = [stage.newest for stage in self._stages]
        return min(map(min, [here, *self._elsewhere.values()]))

    @property
    def own_slowest(self) -> int:
        """The newest version that every stage of this process has."""
        return min(stage.newest for stage in self._own)

    def when_updated(self, updated: Callable[[int, int], None]) -> None:
        """Have a function called after each update in this process, with stage and new version."""
        self._updated = updated

    def note(self, stage: int, version: int, replica: int) -> None:
        """Note that another process, which belongs to a replica, made a version of a stage."""
        with self._lock:
            if replica in self._elsewhere:
                self._elsewhere[replica][stage] = version
            else:
                self._stages[stage].newest = version
            if not self._stopped:
                self._forget()
            self._lock.notify_all()

    def _at(self, version: int) -> None:
        """Note that all stages of all other replicas have this version."""
        self._elsewhere = {replica: [version] * len(self._stages) for replica in self._elsewhere}

    @property
    def versions(self) -> list[int]:
        """Stage → how many versions are alive now. Waits for a running update."""
        with self._alive() as alive:
            return [len(versions) for versions in alive]

    @property
    def bytes(self) -> list[int]:
        """Stage → the bytes of all its versions; shared memory counts once. Waits for a running
        update."""
        with self._alive() as alive:
            storages = [
                [tensor.untyped_storage() for tensors in versions for tensor in tensors.values()]
                for versions in alive
            ]
        return [sum({s.data_ptr(): s.nbytes() for s in each}.values()) for each in storages]

    @contextmanager
    def _alive(self) -> Iterator[list[list[Buffers]]]:
        """Stage → its versions, empty for another process's stage. No update runs in the block, as
        it would drop a version, or leave one half made."""
        with self._lock:
            self._lock.wait_for(lambda: self._running == 0)
            yield [
                [*stage.live.values(), *stage.predicted.values()] if stage in self._own else []
                for stage in self._stages
            ]

    def open(
        self,
        stages: Sequence[Stage],
        state: Mapping[str, Tensor],
        deferred: Sequence[DeferredNorm] = (),
        *,
        changed: bool,
    ) -> None:
        """Bind a plan, see ``bind``, while no batch is in flight. If the user ``changed``
        parameters since the last batch, the current ones become the only version."""
        if changed:
            self.base = self.slowest
            for stage in self._stages:
                stage.restart(self.base)
            self._at(self.base)
        self.bind(stages, state, deferred)

    def follow(self, delays: Sequence[int], *, awaits: bool) -> None:
        """Change to the delays of another schedule, while no batch is in flight. If a delay grows,
        the oldest version that a stage has stands for those that it no longer has.

        Args:
            delays: stage → by how many versions its batches read behind the newest.
            awaits: whether an update may wait for another stage's.
        """
        self._awaits = awaits
        for stage, delay in zip(self._stages, delays, strict=True):
            stage.follow(delay)

    @property
    def written(self) -> set[str]:
        """The names of this process's parameters that the user changed since the last batch."""
        return {name for stage in self._own for name in stage.written()}

    def history(self, *, changed: bool) -> History:
        """The versions for a checkpoint, while no batch is in flight. If the user ``changed``
        parameters since the last batch, the next batch reads no older version."""
        newest = self.slowest
        if changed:
            return History(newest, newest)
        kept: dict[int, Buffers] = {}
        for stage in self._stages:
            for version, tensors in stage.kept().items():
                kept.setdefault(version, {}).update(tensors)
        if any(stage.predicts for stage in self._stages):
            return History(newest, self.base, predicted=kept)
        return History(newest, self.base, older=kept)

    def resume(self, history: History) -> None:
        """Go on from a checkpoint; the parameters have the values of its newest version already."""
        known = history.predicted if any(s.predicts for s in self._stages) else history.older
        self.base = max(history.base, min(known, default=history.newest))
        for stage in self._stages:
            stage.resume(history.newest, self.base, known)
        self._at(history.newest)

    def expect(self, batch: int) -> None:
        """Register a batch; its update will use the current settings of the optimizers."""
        with self._lock:
            for index, stage in enumerate(self._stages):
                if stage.optimizer is not None:
                    # learning-rate schedulers check this flag, and warn of a wrong order
                    stage.optimizer._opt_called = True  # type: ignore[attr-defined]
                    groups = [frozen(group) for group in stage.optimizer.param_groups]
                    self._groups[index, batch] = groups

    def parameters(self, stage: int, version: int) -> Sequence[Tensor]:
        tensors = self._stages[stage].read(version)
        return [
            tensors[name] if name in tensors else self._state[name] for name in self._names[stage]
        ]

    def update(self, stage: int, reads: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        weights = self._stages[stage]
        kept = weights.newest + 1 - weights.delay
        sharded = isinstance(weights, ShardedStage)
        waits = self._awaits and not sharded
        with self._updating(lambda: not waits or self.slowest >= kept):
            named = dict(zip(self._names[stage], gradients, strict=True)) if gradients else {}
            with self._lock:
                groups = self._groups.pop((stage, reads), [])
            changed = weights.update(named, groups, self.slowest)
            self._carry(stage, changed)
            self._forget()
        if not sharded:
            self._updated(stage, weights.newest)
        return weights.parts()

    def gather(self, stage: int, version: int, parts: Sequence[Sequence[Tensor]]) -> None:
        """See Weights.gather. It overwrites an older version, as ``update`` does for a stage that
        is not sharded, and waits for the slowest stage in the same way."""
        weights = self._stages[stage]
        if not isinstance(weights, ShardedStage):
            return
        with self._updating(lambda: not self._awaits or self.slowest >= version - weights.delay):
            weights.gather(version, parts, self.slowest)
            self._forget()
        self._updated(stage, weights.newest)

    def _forget(self) -> None:
        """Drop what was kept to roll back beyond the slowest stage's version."""
        slowest = self.slowest
        for stage in self._stages:
            stage.forget(slowest)

    def _carry(self, stage: int, changed: Sequence[Mapping[str, Any]]) -> None:
        """Set the settings that an optimizer's step changed for later batches, too."""
        optimizer = self._stages[stage].optimizer
        if optimizer is None or not any(changed):
            return
        with self._lock:
            later = [groups for (s, _), groups in self._groups.items() if s == stage]
            for groups in (optimizer.param_groups, *later):
                for group, values in zip(groups, changed, strict=True):
                    group.update(values)

    def recover(self, version: int) -> None:
        """After ``stop``: roll all stages back to a version that every stage has. It is then the
        only version, and so many batches count as trained."""
        self.base = version
        with torch.no_grad():
            for stage in self._stages:
                if stage in self._own:
                    stage.return_to(version)
                else:
                    stage.restart(version)
        self._at(version)
        self._groups.clear()
        self._stopped = False

    def gathered(self, written: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values of buffers after a batch, from what a device's forwards have written by name:
        their newest values, or moments for the statistics of a deferred BatchNorm."""
        return moments.commit(self._deferred, {**self._state, **written}, written)

    def trim(self) -> None:
        """Keep only the versions that the next batch may read, while no batch is in flight: a stage
        that did not wait for the slowest may have kept one more for a roll-back."""
        for stage in self._stages:
            stage.trim()

    def commit(self, state: Mapping[str, Tensor]) -> None:
        """Write values to the model's buffers, by name."""
        with torch.no_grad():
            for name, value in state.items():
                self._state[name].copy_(value)
