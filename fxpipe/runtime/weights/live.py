"""The model's parameters and buffers as the running program sees them, and their update."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxpipe.formatting import without_addresses
from fxpipe.ir.plan import Stage
from fxpipe.ir.traced import DeferredNorm
from fxpipe.parts import Parts
from fxpipe.runtime.interpreter import Stopped

_PARAMETERS = ("params", "param_names")
"""The keys of a parameter group that are not settings."""


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in _PARAMETERS}


def unshared(value: Any) -> Any:
    """A setting that nobody else changes in place: tensors, which learning rates may be, are
    copied."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def setting_text(setting: Any) -> str:
    """The text of a setting: with all digits, and without memory addresses."""
    value = setting.tolist() if isinstance(setting, Tensor) else setting
    return without_addresses(repr(value))


Mark = tuple[Any, int]
"""A setting, and its version counter, which counts changes in place."""


def marked(value: Any) -> Mark:
    """A setting as it is now, for ``differs`` to compare with later."""
    return value, value._version if isinstance(value, Tensor) else 0


def differs(before: Mark, value: Any) -> bool:
    """Whether a setting was replaced, or changed in place, since it was marked."""
    return before[0] is not value or before[1] != marked(value)[1]


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Detached clones of tensors; those of one device and dtype are copied in one launch."""
    results = [tensor.detach() for tensor in tensors]
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(results):
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            alike[tensor.device, tensor.dtype].append(index)
        else:
            results[index] = tensor.clone()
    for indices in alike.values():
        sources = [results[index] for index in indices]
        copies = [torch.empty_like(source) for source in sources]
        torch._foreach_copy_(copies, sources)
        for index, value in zip(indices, copies, strict=True):
            results[index] = value
    return results


class Weights:
    """Reads and updates the model's parameters and buffers, by stage and version.

    Nothing is kept to undo an update: from the first one on, a failure ends the pipe.

    Attributes:
        deferred: the BatchNorms whose statistics are updated at the end of a batch's forwards.
        begun: the stages of this process whose updates have begun, in that order.
        arrived: whether a device of this process has come to the barrier before the updates.
    """

    def __init__(self) -> None:
        self._state: Mapping[str, Tensor] = {}
        self._names: list[list[str]] = []
        self._buffers: list[list[Tensor]] = []
        self.deferred: Sequence[DeferredNorm] = ()
        self._lock = threading.Condition()
        self._stopped = False
        self._running = 0
        self.begun: list[int] = []
        self.arrived = False

    def bind(
        self,
        stages: Sequence[Stage],
        state: Mapping[str, Tensor],
        deferred: Sequence[DeferredNorm] = (),
    ) -> None:
        """Look up the tensors of a plan's stages.

        Args:
            stages: the stages.
            state: name in the model → parameter or buffer.
            deferred: the BatchNorms whose statistics are updated once per batch.
        """
        self._state = state
        self.deferred = deferred
        self._names = [[a.target for a in stage.parameters] for stage in stages]
        self._buffers = [[state[a.target] for a in stage.buffers] for stage in stages]
        if written := {write.target for stage in stages for write in stage.writes}:
            # ``commit`` changes them, and backward must read the values that forward read
            copies = dict(zip(written, clones([state[n] for n in written]), strict=True))
            self._buffers = [
                [copies.get(a.target, state[a.target]) for a in s.buffers] for s in stages
            ]

    def parameters(self, stage: int, version: int) -> Sequence[Tensor]:
        """A stage's parameters in a version."""
        raise NotImplementedError

    def trained(self, stage: int) -> list[bool]:
        """Whether each of a stage's parameters wants a gradient; versions do not differ in that."""
        return [self._state[name].requires_grad for name in self._names[stage]]

    def buffers(self, stage: int) -> Sequence[Tensor]:
        """A stage's buffers as they were before the run."""
        return self._buffers[stage]

    def started(self, stage: int) -> list[Tensor | None]:
        """The tensors from which the sums of a stage's gradients start, to be added to in place;
        None for 0."""
        return [None] * len(self._names[stage])

    @property
    def gathers(self) -> bool:
        """Whether ``gathered`` changes something."""
        return False

    def gathered(self, written: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is kept at the end of a step of what a device's forwards have written, by name."""
        return written

    def update(self, stage: int, reads: int, gradients: Sequence[Tensor | None]) -> None:
        """Update a stage with the gradients of a batch that read the version ``reads``. ``.grad``
        stays as it was."""
        raise NotImplementedError

    def stop(self) -> bool:
        """Let no more updates start. Returns whether one is running, for which the caller waits."""
        with self._lock:
            self._stopped = True
            return self._running > 0

    def stop_before_updates(self, ranks: bool) -> bool:
        """``stop``, but only if no update has begun, over several ``ranks`` in no process. Returns
        whether none has."""
        with self._lock:
            early = not (self.begun or (ranks and self.arrived))
            self._stopped = self._stopped or early
            return early

    def arrive(self) -> None:
        """Note that a device has come to the barrier. Raises Stopped after ``stop``."""
        with self._lock:
            if self._stopped:
                raise Stopped
            self.arrived = True

    def outcome(self) -> dict[int, bool | int]:
        """What ``stop`` has left: stage of this process → how far its update has come."""
        raise NotImplementedError

    @contextmanager
    def _updating(self, stage: int) -> Iterator[None]:
        """Run a stage's update in the block. Raises Stopped after ``stop``."""
        with self._lock:
            if self._stopped:
                raise Stopped
            self._running += 1
            self.begun.append(stage)
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._lock.notify_all()


class LiveWeights(Weights):
    """One version of the weights: the model's own tensors, which updates change in place.

    Updates come behind a barrier, when all backwards are done, and ``commit`` writes buffers and
    ``.grad`` last. So a failure before the first update leaves everything as it was.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        state: Mapping[str, Tensor],
        optimizers: Sequence[Optimizer | None],
        *,
        onto_grad: bool,
        deferred: Sequence[DeferredNorm] = (),
    ) -> None:
        """Bind the stages to their tensors and optimizers.

        Args:
            stages, state, deferred: as for ``bind``.
            optimizers: stage → its optimizer, or None.
            onto_grad: whether the sums of gradients start from ``.grad`` and then replace it.
        """
        super().__init__()
        self.bind(stages, state, deferred)
        self._parameters = [[state[name] for name in names] for names in self._names]
        self._optimizers = optimizers
        self._onto_grad = onto_grad
        self._updated: set[int] = set()

    @property
    def by_name(self) -> dict[str, Tensor]:
        """Name in the model → parameter, over all stages."""
        return {name: self._state[name] for names in self._names for name in names}

    def named(self, gradients: Mapping[int, Sequence[Tensor | None]]) -> dict[str, Tensor]:
        """Name in the model → gradient, for parameters that have one."""
        return {
            name: total
            for stage, totals in gradients.items()
            for name, total in zip(self._names[stage], totals, strict=True)
            if total is not None
        }

    def parameters(self, stage: int, version: int) -> Sequence[Tensor]:
        return self._parameters[stage]

    def started(self, stage: int) -> list[Tensor | None]:
        """See Weights.started: copies of ``.grad`` if the step accumulates into it."""
        if not self._onto_grad:
            return super().started(stage)
        before = [parameter.grad for parameter in self._parameters[stage]]
        copies = iter(clones([gradient for gradient in before if gradient is not None]))
        return [None if gradient is None else next(copies) for gradient in before]

    def update(self, stage: int, reads: int, gradients: Sequence[Tensor | None]) -> None:
        optimizer = self._optimizers[stage]
        if optimizer is None or not gradients:
            return
        parameters = self._parameters[stage]
        with self._updating(stage):
            before = [parameter.grad for parameter in parameters]
            try:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
            finally:
                for parameter, gradient in zip(parameters, before, strict=True):
                    parameter.grad = gradient
        self._updated.add(stage)

    def outcome(self) -> dict[int, bool | int]:
        """Stage whose update has begun → whether it has ended."""
        return {stage: stage in self._updated for stage in self.begun}

    def commit(
        self,
        state: Mapping[str, Tensor],
        gradients: Mapping[int, Sequence[Tensor | None]],
    ) -> None:
        """Write the results of a run to the model.

        Args:
            state: name of a buffer in the model → its value after the last micro-batch.
            gradients: stage → the sums of its gradients, for ``.grad``.
        """
        with torch.no_grad():
            if self.deferred:
                commit = Parts.commit_moments.find("deferred BatchNorm")
                state = commit(self.deferred, self._state, state)
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
