"""The versions of one stage's weights, and the update that makes the next one.

An update overwrites a version that no batch will read again, so a stage with delay d needs only
d + 1 copies of its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.errors import InputError
from fxpipe.runtime.weights.live import differs, marked, settings, unshared
from fxpipe.torchtools.optimizers import twin

Buffers = dict[str, Tensor]
"""Name in the model → one version of the parameter."""


class StageWeights:
    """The versions of one stage.

    Attributes:
        newest: the number of the newest version.
        live: version → its tensors. Those of the newest share memory with the model's parameters.
        oldest: the oldest version that can be read; batches that ask for an older one read it.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer | None,
        delay: int,
    ) -> None:
        self.parameters = dict(parameters)
        self.optimizer = optimizer
        self.delay = delay
        self.newest = 0
        self.live: dict[int, Buffers] = {}
        self.oldest = 0
        self._changes: dict[str, int] = {}

    def restart(self, version: int) -> None:
        """Take the current parameters as this version, and drop all others."""
        self.newest = self.oldest = version
        tensors = {name: _alias(parameter) for name, parameter in self.parameters.items()}
        self.live = {version: tensors}
        self._note()

    def follow(self, delay: int) -> None:
        """Change the delay, while no batch is in flight."""
        if delay == self.delay:
            return
        self.delay = delay
        for version in [version for version in self.live if version < self.newest - delay]:
            del self.live[version]
        self.oldest = min(self.live)

    def read(self, version: int) -> Buffers:
        """The weights that batches of a version read: the oldest ones if the version is older."""
        return self.live[max(version, self.oldest)]

    def written(self) -> Iterator[str]:
        """The names of the parameters that the user changed, or gave other memory."""
        newest = self.live[self.newest]
        for name, parameter in self.parameters.items():
            moved = parameter.data_ptr() != newest[name].data_ptr()
            if moved or parameter._version != self._changes[name]:
                yield name

    def refuse_changed(self) -> None:
        """Raises InputError if the user changed a parameter."""
        if name := next(self.written(), None):
            raise InputError(
                f"the parameter {name!r} was changed by hand while batches were in flight; call "
                "pipe.flush() before"
            )

    def update(
        self,
        gradients: Mapping[str, Tensor | None],
        groups: Sequence[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """Make the next version.

        Args:
            gradients: name → the batch's gradient.
            groups: the settings of the optimizer's groups when the batch was submitted.

        Returns:
            Group → the settings that the optimizer changed in its step.
        """
        self.refuse_changed()
        needed = self.newest + 1 - self.delay
        if self.optimizer is None:
            self.live[self.newest + 1] = self.live[self.newest]
            self.newest += 1
            retire(self.live, needed)
            return []
        tensors = copy_of(self.live[self.newest], retire(self.live, needed))
        memory = {name: tensor.detach() for name, tensor in tensors.items()}
        changed = self._step(self.parameters, memory, gradients, groups)
        self._append(tensors)
        return changed

    def _step(
        self,
        trained: Mapping[str, nn.Parameter],
        memory: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor | None],
        groups: Sequence[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """Step the optimizer, see ``update``. ``memory`` has a copy of the version before, which
        the step changes in place."""
        assert self.optimizer is not None
        before = {name: parameter.grad for name, parameter in trained.items()}
        try:
            for name, parameter in trained.items():
                parameter.data, parameter.grad = memory[name], gradients.get(name)
            return step_with(self.optimizer, groups)
        finally:
            for name, parameter in trained.items():
                parameter.grad = before[name]

    def _append(self, tensors: Buffers) -> None:
        """Take these tensors, whose memory the parameters share, as the next version."""
        self.newest += 1
        self.live[self.newest] = tensors
        self._note()

    def _note(self) -> None:
        self._changes = {name: p._version for name, p in self.parameters.items()}


def retire(versions: dict[int, Buffers], needed: int) -> Buffers:
    """Drop the versions before ``needed``. Returns the tensors of one of them, for reuse; empty if
    there are none, or a later version shares them."""
    spare: Buffers = {}
    for version in sorted(versions):
        if version < needed:
            spare = versions.pop(version, {})
    shared = any(tensors is spare for tensors in list(versions.values()))
    return {} if shared else spare


def copy_of(now: Buffers, spare: Buffers) -> Buffers:
    """A copy of a version, in spare tensors where possible. Parameters that are not trained never
    change, so all versions share them."""
    trained = {name: tensor for name, tensor in now.items() if tensor.requires_grad}
    copies = {n: spare[n] if n in spare else torch.empty_like(x) for n, x in trained.items()}
    if trained:
        with torch.no_grad():
            torch._foreach_copy_([*copies.values()], [*trained.values()])
    return now | {name: tensor.requires_grad_(True) for name, tensor in copies.items()}


def _alias(parameter: Tensor) -> Tensor:
    """A tensor with the same memory but its own version counter: autograd must not take later
    updates of the parameter, which are in other memory, for changes of this tensor."""
    return parameter.data.requires_grad_(parameter.requires_grad)


def frozen(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings, with copies of those that could be changed in place."""
    return {key: unshared(value) for key, value in settings(group).items()}


def step_with(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Step an optimizer with older settings of its groups.

    A learning-rate scheduler may already have changed the current settings for a later batch. So a
    copy of the optimizer, with other groups and the same state, makes the step. Attributes that the
    step changes in the copy are then set in the optimizer.

    Returns:
        Group → the settings that the step changed.
    """
    values = [frozen(group) for group in groups]
    pairs = zip(optimizer.param_groups, values, strict=True)
    stepped = twin(optimizer, [{**group, **older} for group, older in pairs])
    attributes = dict(vars(stepped))
    before = [{key: marked(value) for key, value in group.items()} for group in values]
    type(optimizer).step(stepped)
    for name, value in vars(stepped).items():
        if name != "param_groups" and value is not attributes.get(name):
            setattr(optimizer, name, value)
    return [
        {
            key: value
            for key, value in settings(after).items()
            if key not in marks or differs(marks[key], value)
        }
        for marks, after in zip(before, stepped.param_groups, strict=True)
    ]
