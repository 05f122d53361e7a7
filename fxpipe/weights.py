"""The model's parameters and buffers as the running program sees them, and their update."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from fxpipe.interpreter import Stopped
from fxpipe.plan import Stage


@dataclass(frozen=True)
class _Before:
    """A stage's parameters and optimizer as they were before its update."""

    parameters: list[torch.Tensor]
    values: list[torch.Tensor]
    optimizer: Optimizer
    state: dict[str, Any]


class LiveWeights:
    """One version of the weights: the model's own tensors, changed in place at the update.

    An update is part of a transaction: until ``commit`` every stage can be put back. The copies
    that this takes live from a stage's update to the commit, when no activation is alive any
    more, so they seldom raise the peak of memory.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        state: Mapping[str, torch.Tensor],
        optimizers: Sequence[Optimizer | None],
    ) -> None:
        """Bind stages to tensors.

        Args:
            stages: the plan's stages.
            state: name in the model → parameter, buffer or constant.
            optimizers: stage → its optimizer; None for a stage without parameters, or where
                gradients go to ``.grad``.
        """
        self._parameters = [[state[a.target] for a in s.parameters] for s in stages]
        self._buffers = [[state[a.target] for a in s.buffers] for s in stages]
        self._state = state
        self._names = [[a.target for a in s.parameters] for s in stages]
        self._optimizers = optimizers
        self._to_grad = all(optimizer is None for optimizer in optimizers)
        self._lock = threading.Lock()
        self._stopped = False
        self._updating = 0
        self._before: list[_Before] = []

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        """Name in the model → parameter, of all stages."""
        return {name: self._state[name] for names in self._names for name in names}

    def named(
        self, gradients: Mapping[int, Sequence[torch.Tensor | None]]
    ) -> dict[str, torch.Tensor]:
        """Name in the model → gradient, where there is one."""
        return {
            name: total
            for stage, totals in gradients.items()
            for name, total in zip(self._names[stage], totals, strict=True)
            if total is not None
        }

    def parameters(self, stage: int, version: int) -> Sequence[torch.Tensor]:
        """See Weights.parameters."""
        return self._parameters[stage]

    def buffers(self, stage: int) -> Sequence[torch.Tensor]:
        """See Weights.buffers."""
        return self._buffers[stage]

    def gradients(self, stage: int) -> Sequence[torch.Tensor | None]:
        """See Weights.gradients: ``.grad`` where the step adds to it, as torch does."""
        if not self._to_grad:
            return [None] * len(self._parameters[stage])
        return [parameter.grad for parameter in self._parameters[stage]]

    def update(
        self, stage: int, reads: int, writes: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """See Weights.update. The caller's own ``.grad`` is left as it was."""
        optimizer = self._optimizers[stage]
        if optimizer is None or not gradients:
            return
        parameters = self._parameters[stage]
        with self._lock:
            if self._stopped:
                raise Stopped
            self._updating += 1
        try:
            values = [parameter.detach().clone() for parameter in parameters]
            state = copy.deepcopy(optimizer.state_dict())
            self._before.append(_Before(list(parameters), values, optimizer, state))
            own = [parameter.grad for parameter in parameters]
            try:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
            finally:
                for parameter, gradient in zip(parameters, own, strict=True):
                    parameter.grad = gradient
        finally:
            with self._lock:
                self._updating -= 1

    def stop(self) -> bool:
        """Let no further update begin. Returns whether one is running, which must be awaited."""
        with self._lock:
            self._stopped = True
            return self._updating > 0

    def roll_back(self) -> None:
        """Put every stage back that this run has updated."""
        with torch.no_grad():
            for before in self._before:
                for parameter, value in zip(before.parameters, before.values, strict=True):
                    parameter.copy_(value)
                before.optimizer.load_state_dict(before.state)
        self._before.clear()

    def commit(
        self,
        state: Mapping[str, torch.Tensor],
        gradients: Mapping[int, Sequence[torch.Tensor | None]],
    ) -> None:
        """Make what a run has computed the model's.

        Args:
            state: name in the model → what the last micro-batch wrote to the buffer.
            gradients: stage → sums of gradients, for ``.grad``.
        """
        self._before.clear()
        with torch.no_grad():
            for name, value in state.items():
                self._state[name].copy_(value)
            for stage, totals in gradients.items():
                for parameter, total in zip(self._parameters[stage], totals, strict=True):
                    if total is None:
                        continue
                    if parameter.grad is None:
                        parameter.grad = total
                    else:
                        parameter.grad.copy_(total)
