"""The state of training besides the model: optimizers, versions of the weights, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpipe.errors import CheckpointError, InputError, near
from fxpipe.ir.plan import Plan
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.traced import Traced
from fxpipe.runtime.weights.checkpoint import Checkpoint, extra_states, set_extra_states
from fxpipe.runtime.weights.clipping import Clipping
from fxpipe.runtime.weights.optimizer_state import OptimizerState
from fxpipe.runtime.weights.optimizers import Optimizers
from fxpipe.runtime.weights.stage_weights import History
from fxpipe.runtime.weights.versions import VersionedWeights
from fxpipe.signals import HeldSignals


class Progress:
    """The state of training besides the model.

    Attributes:
        batches: how many batches have updated the weights without overlap.
        stages: the optimizers of the stages; None for a pipe without an optimizer.
        versions: the versions of the weights; None before batches have overlapped.
        ended: why only a checkpoint can be restored: which stages have updated; else empty.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Optimizers | None,
        clipping: Clipping | None,
        generators: Callable[[], Mapping[str, torch.Generator]],
        owns: Callable[[int], bool],
    ) -> None:
        """Start with nothing trained.

        Args:
            model: the model.
            stages: the optimizers of the stages; None for a pipe without an optimizer.
            clipping: clips the gradients; None if they are not clipped.
            generators: returns device → torch's generator for it, without the CPU's.
            owns: whether this process trains a stage.
        """
        self.batches = 0
        self.ended = ""
        self.versions: VersionedWeights | None = None
        self.stages = stages
        self._model = model
        self._clipping = clipping
        self._generators = generators
        self._owns = owns
        self._offered: dict[int, Tensor] = {}
        self._history: History | None = None  # a checkpoint's, until a plan is known
        self._restored: Mapping[str, tuple[int, int]] = {}
        self._followed: Schedule | None = None

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
        _gather(self._model, "", state)
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
            state = dict(self._model.named_parameters(remove_duplicate=False))
        self._refuse_unknown(plan, state)
        if submits:
            self.stages.begin()
        return made

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
        return self._history is not None and not self._marks().items() <= self._restored.items()

    def versions_of(self, plan: Plan, schedule: Schedule, *, changed: bool) -> VersionedWeights:
        """The versions for a schedule whose batches overlap. ``changed`` tells whether parameters
        are ``changed`` in any process."""
        optimizers = self.optimizers_of(plan)
        if self.versions is None:
            parameters = dict(self._model.named_parameters(remove_duplicate=False))
            versions = VersionedWeights(
                [
                    {a.target: parameters[a.target] for a in stage.parameters if self._owns(index)}
                    for index, stage in enumerate(plan.stages)
                ],
                optimizers,
                schedule.delays,
                owns=self._owns,
            )
            names = self._names()
            targets = {
                names[parameters[a.target]]: a.target for s in plan.stages for a in s.parameters
            }
            versions.resume(self._current(changed).renamed(targets))
            self.versions, self._history = versions, None
        elif schedule is not self._followed:
            self.versions.follow(schedule.delays)
        self._followed = schedule
        return self.versions

    def end(self, why: str) -> None:
        """Note that a failure has left the stages at different updates."""
        self.ended = why

    def count(self) -> None:
        """Count a batch that has updated the weights without overlap."""
        self.batches += 1
        self._history = None

    def checkpoint(self, extra: Any = None, *, changed: bool) -> Checkpoint:
        """All that training needs to go on, and the user's ``extra`` values, while no batch is in
        flight. Tensors are not copied. ``changed`` is as for ``versions_of``."""
        names = self._names()
        gradients = {name: p.grad for p, name in names.items() if p.grad is not None}
        return Checkpoint(
            parameters={name: parameter for parameter, name in names.items()},
            buffers=dict(self._model.named_buffers()),
            gradients=gradients if self.stages is None else {},
            history=self._current(changed),
            optimizer=None if self.stages is None else self.stages.state(),
            clipping=None if self._clipping is None else self._clipping.state(),
            random=torch.get_rng_state(),
            device_random={name: g.get_state() for name, g in self._generators().items()},
            modules=extra_states(self._model),
            extra=extra,
        )

    def restore(
        self,
        saved: Checkpoint,
        agreed: Callable[[], object] = lambda: None,
    ) -> None:
        """Go on from a checkpoint, while no batch is in flight. After an error nothing has changed.

        Args:
            saved: the checkpoint. Tensors on the meta device belong to other processes' stages.
            agreed: called after all checks, before anything changes; it may raise.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer.
            InputError: the user's function returns no optimizer.
        """
        names = self._names()
        parameters = {name: parameter for parameter, name in names.items()}
        buffers = dict(self._model.named_buffers())
        _check("parameter", parameters, saved.parameters)
        _check("buffer", buffers, saved.buffers)
        _check("gradient", _part(parameters, saved.gradients), saved.gradients)
        self._check_history(saved.history, parameters)
        values = {**saved.parameters, **saved.buffers}
        if any(value.is_meta for value in values.values()):
            values = {name: value for name, value in values.items() if not value.is_meta}
            saved = saved.part(values)
        if self._clipping is not None and saved.clipping is not None:
            self._clipping.check(saved.clipping)
        devices = saved.device_random
        generators = [
            (torch.default_generator, saved.random),
            *((g, devices[name]) for name, g in self._generators().items() if name in devices),
        ]
        for generator, state in generators:
            _check_random(generator, state)
        restore_optimizers = self._restoring(saved.optimizer, values)
        take_back = set_extra_states(self._model, saved.modules)
        try:
            agreed()
        except BaseException:
            take_back()
            raise
        # a signal must not interrupt these changes halfway
        with HeldSignals(), torch.no_grad():
            self.ended = "a checkpoint was restored only in part"
            for name, tensor in (*parameters.items(), *buffers.items()):
                if name in values:
                    tensor.copy_(values[name])
            if self.stages is None:
                for name, parameter in parameters.items():
                    gradient = saved.gradients.get(name)
                    parameter.grad = None if gradient is None else gradient.to(parameter.device)
            restore_optimizers()
            self.batches, self.versions, self._history = saved.history.newest, None, saved.history
            if self._clipping is not None and saved.clipping is not None:
                self._clipping.load(saved.clipping)
            self._restored = self._marks()
            for generator, state in generators:
                generator.set_state(state)
            self.ended = ""

    def _check_history(self, history: History, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raises CheckpointError if the saved versions do not fit the parameters."""
        newest, base = history.newest, history.base
        older = all(0 <= version < newest for version in history.older)
        if not (0 <= base <= newest and older):
            raise CheckpointError(
                f"the checkpoint's history has {newest} batches, and the versions "
                f"{sorted({base, *history.older})}; restore another checkpoint"
            )
        for version, tensors in history.older.items():
            _check(f"version {version} of parameter", _part(parameters, tensors), tensors)

    def _restoring(self, saved: OptimizerState | None, own: Container[str]) -> Callable[[], None]:
        """Check the saved state of the optimizers. Returns a function that loads it."""
        if self.stages is None:
            if saved is None:
                return lambda: None
            raise CheckpointError(
                f"the checkpoint holds the state of {saved.kind}, and the pipe has no optimizer; "
                "give compile(..., optimizer=...)"
            )
        if saved is None:
            raise CheckpointError(
                "the checkpoint was made by a pipe without an optimizer, and this one has one; "
                "leave optimizer= out of compile()"
            )
        return self.stages.restoring(saved, own)

    def _current(self, changed: bool) -> History:
        """The current versions, with each parameter under its first name in the model."""
        if self.versions is not None:
            names, targets = self._names(), self._model.named_parameters(remove_duplicate=False)
            history = self.versions.history(changed=changed)
            return history.renamed({target: names[p] for target, p in targets})
        if self._history is not None and not changed:
            return self._history
        return History(self.batches, self.batches)

    def _marks(self) -> dict[str, tuple[int, int]]:
        """Name → address and version of each parameter that has data here."""
        named = self._names().items()
        return {name: (p.data_ptr(), p._version) for p, name in named if not p.is_meta}

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._model.named_parameters()}


def _part(values: Mapping[str, nn.Parameter], names: Iterable[str]) -> dict[str, nn.Parameter]:
    return {name: values[name] for name in names if name in values}


def _check_random(generator: torch.Generator, state: Tensor) -> None:
    """Raises CheckpointError if a generator cannot take a state."""
    try:
        torch.Generator(generator.device).set_state(state)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint's state of the random generator of {generator.device} is invalid "
            f"({error}); restore another checkpoint"
        ) from error


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """The properties in which tensors must be equal to be copied to each other."""
    return tensor.dtype, tensor.layout, tensor.shape


def _described(tensor: Tensor) -> str:
    """A tensor as ``6×6 of float32``."""
    sizes = "×".join(map(str, tensor.shape)) or "a scalar"
    return f"{sizes} of {tensor.dtype}".replace("torch.", "")


def _check(kind: str, expected: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError at the first tensor that differs in name, shape, dtype or layout."""
    for name, tensor in expected.items():
        if name not in saved:
            raise CheckpointError(
                f"the checkpoint is of another model: it has no {kind} {name!r}; "
                f"{near(name, saved)}"
            )
        if _kind(saved[name]) != _kind(tensor):
            raise CheckpointError(
                f"the checkpoint is of another model: its {kind} {name!r} is "
                f"{_described(saved[name])}, and the pipe's is {_described(tensor)}"
            )
    for name in saved:
        if name not in expected:
            raise CheckpointError(
                f"the checkpoint is of another model: its {kind} {name!r} is none of the pipe's; "
                f"{near(name, expected)}"
            )


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
