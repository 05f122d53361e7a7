"""Several versions of the weights, for steps that overlap without a flush.

PipeDream-2BW's double buffering (arXiv 2006.09503), for any delay d: batch t reads version
max(t − d, 0), and the update from batch t writes version t + 1. A stage has d + 1 copies of its
weights, and an update overwrites the one whose version no batch will read again. If the
micro-batches of a stage have different delays, d is the greatest of them.

A failure ends the pipe, as the stages have then updated with different batches, and the states of
their optimizers that belong to older versions are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.extensions.overlapping.stage_weights import Buffers, StageWeights, frozen
from fxpipe.ir.plan import Stage
from fxpipe.ir.traced import DeferredNorm
from fxpipe.parts import Parts
from fxpipe.runtime.weights.live import Weights


class VersionedWeights(Weights):
    """The parameters of all stages, in as many versions as the schedule's delay requires.

    Attributes:
        base: the oldest version that any stage can read.
        stages: stage → its versions.
    """

    def __init__(
        self,
        parameters: Sequence[Mapping[str, nn.Parameter]],
        optimizers: Sequence[Optimizer | None],
        delays: Sequence[int],
        *,
        owns: Callable[[int], bool] = lambda stage: True,
    ) -> None:
        """Take the current parameters as version 0.

        Args:
            parameters: stage → name in the model → parameter, for the stages of this process.
            optimizers: stage → its optimizer.
            delays: stage → by how many versions its batches read behind the newest.
            owns: whether this process updates a stage. Of other processes' stages only the number
                of the newest version is known, and only while no batch is in flight.
        """
        super().__init__()
        self.base = 0
        self.stages = [
            StageWeights(named, optimizer, delay)
            for named, optimizer, delay in zip(parameters, optimizers, delays, strict=True)
        ]
        for stage in self.stages:
            stage.restart(0)
        self._groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._own = {index: stage for index, stage in enumerate(self.stages) if owns(index)}

    @property
    def slowest(self) -> int:
        """The newest version that every stage of this process has."""
        return min(stage.newest for stage in self._own.values())

    def outcome(self) -> dict[int, bool | int]:
        """Stage of this process → with how many batches it has updated."""
        return {index: stage.newest for index, stage in self._own.items()}

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
                [*stage.live.values()] if index in self._own else []
                for index, stage in enumerate(self.stages)
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
            self.restart(self.slowest)
        self.bind(stages, state, deferred)

    def restart(self, version: int) -> None:
        """Take the current parameters as the only version."""
        self.base = version
        for stage in self.stages:
            stage.restart(version)

    def follow(self, delays: Sequence[int]) -> None:
        """Change to the delays of another schedule, while no batch is in flight. If a delay grows,
        the oldest version that a stage has stands for those that it no longer has.

        Args:
            delays: stage → by how many versions its batches read behind the newest.
        """
        for stage, delay in zip(self.stages, delays, strict=True):
            stage.follow(delay)

    @property
    def written(self) -> set[str]:
        """The names of this process's parameters that the user changed since the last batch."""
        return {name for stage in self._own.values() for name in stage.written()}

    def expect(self, batch: int) -> None:
        """Register a batch; its update will use the current settings of the optimizers."""
        with self._lock:
            for index, stage in enumerate(self.stages):
                if stage.optimizer is not None:
                    groups = [frozen(group) for group in stage.optimizer.param_groups]
                    self._groups[index, batch] = groups

    def parameters(self, stage: int, version: int) -> Sequence[Tensor]:
        tensors = self.stages[stage].read(version)
        return [
            tensors[name] if name in tensors else self._state[name] for name in self._names[stage]
        ]

    def update(self, stage: int, reads: int, gradients: Sequence[Tensor | None]) -> None:
        weights = self.stages[stage]
        with self._updating(stage):
            named = dict(zip(self._names[stage], gradients, strict=True)) if gradients else {}
            with self._lock:
                groups = self._groups.pop((stage, reads), [])
            self._carry(stage, weights.update(named, groups))

    def _carry(self, stage: int, changed: Sequence[Mapping[str, Any]]) -> None:
        """Set the settings that an optimizer's step changed for later batches, too."""
        optimizer = self.stages[stage].optimizer
        if optimizer is None or not any(changed):
            return
        with self._lock:
            later = [groups for (s, _), groups in self._groups.items() if s == stage]
            for groups in (optimizer.param_groups, *later):
                for group, values in zip(groups, changed, strict=True):
                    group.update(values)

    @property
    def gathers(self) -> bool:
        return bool(self.deferred)

    def gathered(self, written: dict[str, Tensor]) -> dict[str, Tensor]:
        """The values of buffers after a batch, from what a device's forwards have written by name:
        their newest values, or moments for the statistics of a deferred BatchNorm."""
        if not self.deferred:
            return written
        commit = Parts.commit_moments.find("deferred BatchNorm")
        values: dict[str, Tensor] = commit(self.deferred, {**self._state, **written}, written)
        return values

    def finished(self, version: int) -> None:
        """Note, once no batch is in flight, that the stages of other processes have a version."""
        for index, stage in enumerate(self.stages):
            if index not in self._own:
                stage.restart(version)

    def commit(self, state: Mapping[str, Tensor]) -> None:
        """Write values to the model's buffers, by name."""
        with torch.no_grad():
            for name, value in state.items():
                self._state[name].copy_(value)
