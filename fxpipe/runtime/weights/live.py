"""The model's parameters and buffers as the running program sees them, and their update."""

from __future__ import annotations

import copy
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxpipe.ir.plan import Stage
from fxpipe.runtime.interpreter import Stopped
from fxpipe.runtime.weights.own_attributes import put_back, values_of
from fxpipe.torchtools import moments
from fxpipe.torchtools.moments import DeferredNorm

if TYPE_CHECKING:
    from fxpipe.runtime.weights.sharding import Shards


_PARAMETERS = ("params", "param_names")
"""The keys of a parameter group that are not settings."""


class OptimizerSnapshot:
    """A copy of an optimizer's state, its groups' settings and its own attributes; with ``weights``
    also of the parameters that it trains.

    ``load_state_dict`` could not restore these exactly: it casts the state to the parameters'
    dtypes.
    """

    def __init__(self, optimizer: Optimizer, *, weights: bool = False) -> None:
        groups = optimizer.param_groups if weights else ()
        self._parameters = [p for group in groups for p in group["params"] if p.requires_grad]
        self._values = clones(self._parameters)
        self._optimizer = optimizer
        states = all_copied([*optimizer.state.values()])
        self._state = dict(zip(optimizer.state, states, strict=True))
        self._groups = [(group, copied(settings(group))) for group in optimizer.param_groups]
        torchs = type(optimizer).__module__.startswith("torch.optim.")  # these keep no attributes
        self._attributes = {} if torchs else values_of(optimizer)

    def put_back(self) -> None:
        """Restore the optimizer, and the parameters if they were copied."""
        for parameter, value in zip(self._parameters, self._values, strict=True):
            parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, values in self._groups:
            for key in group.keys() - values.keys() - {*_PARAMETERS}:
                del group[key]
            group.update(values)
        put_back(self._optimizer, self._attributes)


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in _PARAMETERS}


def unshared(value: Any) -> Any:
    """A setting that nobody else changes in place: tensors, which learning rates may be, are
    copied."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def shown(setting: Any) -> str:
    """The text of a setting: with all digits, and without memory addresses."""
    value = setting.tolist() if isinstance(setting, Tensor) else setting
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


Mark = tuple[Any, int]
"""A setting, and its version counter, which counts changes in place."""


def mark(value: Any) -> Mark:
    """A setting as it is now, for ``differs`` to compare with later."""
    return value, value._version if isinstance(value, Tensor) else 0


def differs(before: Mark, value: Any) -> bool:
    """Whether a setting was replaced, or changed in place, since it was marked."""
    return before[0] is not value or before[1] != mark(value)[1]


def copied(values: Any) -> Any:
    """A copy of the state of one parameter or group, usually a dict."""
    return all_copied([values])[0]


def all_copied(states: Sequence[Any]) -> list[Any]:
    """Copies of several states; their tensors are copied together, see ``clones``."""
    copies = [dict(each) if isinstance(each, dict) else copy.deepcopy(each) for each in states]
    tensors: list[tuple[dict[Any, Any], Any]] = []
    for state in copies:
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor):
                tensors.append((state, key))
            else:
                state[key] = copy.deepcopy(value)
    values = clones([state[key] for state, key in tensors])
    for (state, key), value in zip(tensors, values, strict=True):
        state[key] = value
    return copies


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
    """Reads and updates the model's parameters and buffers, by stage and version."""

    def __init__(self) -> None:
        self._state: Mapping[str, Tensor] = {}
        self._names: list[list[str]] = []
        self._buffers: list[list[Tensor]] = []
        self._deferred: Sequence[DeferredNorm] = ()
        self._lock = threading.Condition()
        self._stopped = False
        self._running = 0

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
        self._deferred = deferred
        self._names = [[a.target for a in stage.parameters] for stage in stages]
        written = {write.target for stage in stages for write in stage.writes}
        # copies, as ``commit`` changes the buffers: backward must read the values that forward read
        copies = dict(zip(written, clones([state[n] for n in written]), strict=True))
        self._buffers = [[copies.get(a.target, state[a.target]) for a in s.buffers] for s in stages]

    def parameters(self, stage: int, version: int) -> Sequence[Tensor]:
        """A stage's parameters in a version."""
        raise NotImplementedError

    @property
    def defers(self) -> bool:
        """Whether BatchNorm statistics are updated only at the end of a batch's forwards."""
        return bool(self._deferred)

    def pooled(self, written: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Join the buffers that the replicas have written (replica → name → value) into one mapping
        name → value: BatchNorm moments are merged over all replicas, every other buffer is the
        first replica's."""
        names = [norm.moments for norm in self._deferred if norm.moments in written[0]]
        merged = {name: moments.merged([values[name] for values in written]) for name in names}
        return written[0] | merged

    def buffers(self, stage: int) -> Sequence[Tensor]:
        """A stage's buffers as they were before the run."""
        return self._buffers[stage]

    def started(self, stage: int) -> list[Tensor | None]:
        """The tensors from which the sums of a stage's gradients start, to be added to in place;
        None for 0."""
        return [None] * len(self._names[stage])

    def update(self, stage: int, reads: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Update a stage with the gradients of a batch that read the version ``reads``. ``.grad``
        stays as it was.

        Returns:
            This replica's parts of the new weights where the optimizers are sharded, else nothing.
        """
        raise NotImplementedError

    def gather(self, stage: int, version: int, parts: Sequence[Sequence[Tensor]]) -> None:
        """Join a stage's new version from its parts, replica → what ``update`` returned there."""
        raise NotImplementedError

    def stop(self) -> bool:
        """Let no more updates start. Returns whether one is running, for which the caller waits."""
        with self._lock:
            self._stopped = True
            self._lock.notify_all()
            return self._running > 0

    @contextmanager
    def _updating(self, may: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Wait until an update may start, which then runs in the block. Raises Stopped after
        ``stop``."""
        with self._lock:
            self._lock.wait_for(lambda: self._stopped or may())
            if self._stopped:
                raise Stopped
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._lock.notify_all()


def joined(like: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Join flat parts, in the order of the replicas, to a tensor like a parameter."""
    whole = torch.empty_like(like, requires_grad=False)
    fill(whole, parts)
    return whole


def fill(target: Tensor, parts: Sequence[Tensor]) -> None:
    """Write flat parts, in the order of the replicas, to a tensor."""
    if target.is_contiguous():
        torch.cat(list(parts), out=target.view(-1))
    else:
        target.copy_(torch.cat(list(parts)).view(target.shape))


class LiveWeights(Weights):
    """One version of the weights: the model's own tensors, which updates change in place.

    A run is a transaction: until ``commit`` every stage can be rolled back, for which copies are
    kept from its update on. No activation is alive then, so they seldom raise the memory peak.

    Attributes:
        constants: the buffers that no stage writes.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        state: Mapping[str, Tensor],
        optimizers: Sequence[Optimizer | None],
        *,
        onto_grad: bool,
        deferred: Sequence[DeferredNorm] = (),
        shards: Mapping[Optimizer, Shards] = MappingProxyType({}),
    ) -> None:
        """Bind the stages to their tensors and optimizers.

        Args:
            stages, state, deferred: as for ``bind``.
            optimizers: stage → its optimizer, or None.
            onto_grad: whether the sums of gradients start from ``.grad`` and then replace it.
            shards: optimizer → the parts of parameters that it trains, if it is sharded.
        """
        super().__init__()
        self.bind(stages, state, deferred)
        self._parameters = [[state[name] for name in names] for names in self._names]
        written = {write.target for stage in stages for write in stage.writes}
        self.constants = [
            state[a.target] for s in stages for a in s.buffers if a.target not in written
        ]
        self._optimizers = optimizers
        self._onto_grad = onto_grad
        self._before: list[OptimizerSnapshot] = []
        self._shards = shards
        self._gathered: dict[int, list[Tensor]] = {}

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
        return self._gathered.get(stage) or self._parameters[stage]

    def started(self, stage: int) -> list[Tensor | None]:
        """See Weights.started: copies of ``.grad`` if the step accumulates into it."""
        if not self._onto_grad:
            return super().started(stage)
        before = [parameter.grad for parameter in self._parameters[stage]]
        copies = iter(clones([gradient for gradient in before if gradient is not None]))
        return [None if gradient is None else next(copies) for gradient in before]

    def update(self, stage: int, reads: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """See Weights.update. Returned parts are copies: parameters change only at ``commit``."""
        optimizer = self._optimizers[stage]
        if optimizer is None or not gradients:
            return []
        shards, parameters = self._shards.get(optimizer), self._parameters[stage]
        with self._updating():
            self._before.append(OptimizerSnapshot(optimizer, weights=shards is None))
            if shards is not None:
                shards.follow()
                shards.hold()
            trained = parameters if shards is None else shards.parts_of(parameters)
            before = [parameter.grad for parameter in trained]
            try:
                for parameter, gradient in zip(trained, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
            finally:
                for parameter, gradient in zip(trained, before, strict=True):
                    parameter.grad = gradient
        return [] if shards is None else shards.trained(parameters)

    def gather(self, stage: int, version: int, parts: Sequence[Sequence[Tensor]]) -> None:
        pieces = zip(*parts, strict=True)
        self._gathered[stage] = [
            joined(parameter, next(pieces)) if parameter.requires_grad else parameter
            for parameter in self._parameters[stage]
        ]

    def roll_back(self) -> None:
        """Restore every stage that this run has updated."""
        with torch.no_grad():
            for snapshot in self._before:
                snapshot.put_back()
        self._forget()

    def _forget(self) -> None:
        """Drop what was kept to undo the updates of this run."""
        self._before.clear()
        self._gathered.clear()
        for optimizer in self._optimizers:
            if optimizer is not None and (shards := self._shards.get(optimizer)) is not None:
                shards.follow()

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
            for stage, values in self._gathered.items():
                for parameter, value in zip(self._parameters[stage], values, strict=True):
                    if value is not parameter:
                        parameter.copy_(value)
            if self._deferred:
                state = moments.commit(self._deferred, self._state, state)
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
        self._forget()
