"""The state of training besides the model: optimizers, and versions of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.errors import InputError
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced
from fxpipe.parts import Parts
from fxpipe.runtime.weights.optimizers import Optimizers
from fxpipe.torchtools.optimizers import parts_of


class Progress:
    """The state of training besides the model.

    Attributes:
        model: the model.
        owns: whether this process trains a stage.
        batches: how many batches have updated the weights without overlap.
        stages: the optimizers of the stages; None for a pipe without an optimizer.
        versions: the versions of the weights, by an extension; None before batches have overlapped.
        older: what the versions begin with, by an extension that has read a checkpoint, until they
            are made or trained on.
        ended: why only a checkpoint can be restored: which stages have updated; else empty.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Optimizers | None,
        owns: Callable[[int], bool],
    ) -> None:
        """Start with nothing trained.

        Args:
            model: the model.
            stages: the optimizers of the stages; None for a pipe without an optimizer.
            owns: whether this process trains a stage.
        """
        self.batches = 0
        self.ended = ""
        self.versions: Any = None
        self.older: Any = None
        self.stages = stages
        self.model = model
        self.owns = owns
        self._offered: dict[int, Tensor] = {}

    @property
    def optimizers(self) -> tuple[Optimizer | None, ...] | None:
        """Stage → its optimizer; None before the first plan."""
        return None if self.stages is None else self.stages.made

    @property
    def trained(self) -> int:
        """How many batches have updated the weights."""
        return self.batches if self.versions is None else self.versions.slowest

    @property
    def weight_versions(self) -> list[int]:
        """Stage → how many versions of its weights are alive; empty if batches never overlapped."""
        return [] if self.versions is None else self.versions.versions

    @property
    def weight_bytes(self) -> list[int]:
        """Stage → the bytes of its live versions; empty if batches never overlapped."""
        return [] if self.versions is None else self.versions.bytes

    def state_of(self, traced: Traced) -> dict[str, Tensor]:
        """The same as ``traced.state_of(model)``, but fast, as every step calls it."""
        state: dict[str, Tensor] = {}
        _gather(self.model, "", state)
        state.update(traced.constants)
        return state

    def optimizers_of(
        self, plan: Plan, state: Mapping[str, Tensor] | None = None, *, submits: bool = False
    ) -> tuple[Optimizer | None, ...]:
        """Stage → its optimizer. All plans have the stages of the first one.

        Args:
            plan: the plan.
            state: name in the model → its current parameter; None to look them up.
            submits: whether a batch is being submitted, whose update is to use the current settings
                of the whole optimizer.

        Raises:
            InputError: the user's function returns no optimizer, or a wrong one.
        """
        if self.stages is None:
            return (None,) * len(plan.stages)
        made = self.stages.made
        if made is None:
            made, self._offered = self.stages.make(plan), {}
        if state is None:
            state = dict(self.model.named_parameters(remove_duplicate=False))
        self._refuse_unknown(plan, state)
        if submits:
            self.stages.begin()
        return made

    def true_weights(self) -> AbstractContextManager[frozenset[Tensor]]:
        """Inside, where parameters hold something else than the weights, as an optimizer's
        ``true_weights`` tells, they hold these; yields them. While no batch is in flight."""
        whole = None if self.stages is None else self.stages.whole
        if whole is None or not any(hasattr(part, "true_weights") for part in parts_of(whole)):
            return nullcontext(frozenset[Tensor]())
        return Parts.true_weights.find("true_weights() of an optimizer")(whole)

    def settings(self) -> list[str]:
        """The settings of the optimizer's groups, a line each, see ``Optimizers.lines``."""
        return [] if self.stages is None else self.stages.lines()

    def _refuse_unknown(self, plan: Plan, state: Mapping[str, Tensor]) -> None:
        """Raises InputError if the plan trains a parameter that the optimizers were not made for,
        as it was replaced since, or is new: no update would reach it."""
        read = {a.target: state[a.target] for stage in plan.stages for a in stage.parameters}
        if not self._offered:
            self._offered = {id(parameter): parameter for parameter in read.values()}
        for name, parameter in read.items():
            # a module that is called in another thread holds plain tensors of some version
            trained = isinstance(parameter, nn.Parameter) and parameter.requires_grad
            if trained and id(parameter) not in self._offered:
                raise InputError(
                    f"parameter {name!r} is not one that the optimizers were made for, so that no "
                    "update would reach it: it has been replaced (a new module, or "
                    "load_state_dict(..., assign=True)), or the first step did not read it; copy "
                    "the new values into the old parameter, or close() the pipe and compile again"
                )

    @property
    def changed(self) -> bool:
        """Whether the user changed parameters of this process since the last batch or checkpoint,
        so that the next batch must read no older version. False if there are no older versions."""
        if self.versions is not None:
            return bool(self.versions.written)
        return self.older is not None and self.older.changed

    def end(self, why: str) -> None:
        """Note that a failure has left the stages at different updates."""
        self.ended = why

    def count(self) -> None:
        """Count a batch that has updated the weights without overlap."""
        self.batches += 1
        self.older = None


def _gather(module: nn.Module, prefix: str, state: dict[str, Tensor]) -> None:
    """Add a module's parameters and buffers by all of their names. It takes a quarter of the time
    of ``named_modules``, whose nested generators pass each module up through all levels."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                state[prefix + name] = tensor
    for name, inner in module._modules.items():
        if inner is not None:
            _gather(inner, f"{prefix}{name}.", state)
