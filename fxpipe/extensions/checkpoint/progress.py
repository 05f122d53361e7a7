"""What a pipe's training has come to, as a checkpoint, and a pipe that goes on from one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxpipe.errors import CheckpointError, near
from fxpipe.extensions.checkpoint.content import (
    Checkpoint,
    History,
    extra_states,
    set_extra_states,
)
from fxpipe.extensions.checkpoint.optimizer import loading, state_of
from fxpipe.pipeline import Pipeline
from fxpipe.signals import HeldSignals

if TYPE_CHECKING:
    from fxpipe.extensions.overlapping.versions import VersionedWeights


@dataclass(frozen=True)
class Restored:
    """The older versions of a checkpoint, until it is known which versions the stages keep.

    Attributes:
        model: the model, which has the newest version.
        history: the versions.
        marks: name → address and version of each parameter that had data here after the restore.
    """

    model: nn.Module
    history: History
    marks: Mapping[str, tuple[int, int]]

    @property
    def changed(self) -> bool:
        """Whether the user has changed parameters of this process since."""
        return not _marks(self.model).items() <= self.marks.items()

    def begin(self, versions: VersionedWeights) -> None:
        """Give the versions of the stages their values."""
        from fxpipe.extensions.checkpoint.history import resume  # needs another extension

        resume(versions, self.history, _targets(self.model))


def taken(pipe: Pipeline, extra: Any = None, *, changed: bool) -> Checkpoint:
    """All that training needs to go on, and the user's ``extra`` values, while no batch is in
    flight. Tensors are not copied. ``changed`` tells whether the user changed parameters since the
    last batch or checkpoint, in any process."""
    model, engine, names = pipe._model, pipe._engine, _names(pipe._model)
    stages = engine.progress.stages
    gradients = {name: p.grad for p, name in names.items() if p.grad is not None}
    return Checkpoint(
        parameters={name: parameter for parameter, name in names.items()},
        buffers=dict(model.named_buffers()),
        gradients=gradients if stages is None else {},
        history=_current(pipe, changed),
        optimizer=None if stages is None else state_of(stages, names),
        clipping=None if engine.clipping is None else engine.clipping.state(),
        random=torch.get_rng_state(),
        device_random={name: g.get_state() for name, g in engine.backend.generators().items()},
        modules=extra_states(model),
        extra=extra,
    )


def restore_progress(pipe: Pipeline, saved: Checkpoint) -> None:
    """Go on from a checkpoint, while no batch is in flight. After an error nothing has changed, on
    any rank. Tensors on the meta device belong to other processes' stages.

    Raises:
        CheckpointError: the checkpoint is of another model or optimizer.
        InputError: the user's function returns no optimizer.
    """
    model, engine, names = pipe._model, pipe._engine, _names(pipe._model)
    progress, clipping = engine.progress, engine.clipping
    parameters = {name: parameter for parameter, name in names.items()}
    buffers = dict(model.named_buffers())
    _check("parameter", parameters, saved.parameters)
    _check("buffer", buffers, saved.buffers)
    _check("gradient", _part(parameters, saved.gradients), saved.gradients)
    _check_history(saved.history, parameters)
    values = {**saved.parameters, **saved.buffers}
    if any(value.is_meta for value in values.values()):
        values = {name: value for name, value in values.items() if not value.is_meta}
        saved = saved.part(values)
    if clipping is not None and saved.clipping is not None:
        clipping.check(saved.clipping)
    devices = saved.device_random
    generators = [
        (torch.default_generator, saved.random),
        *((g, devices[name]) for name, g in engine.backend.generators().items() if name in devices),
    ]
    for generator, state in generators:
        _check_random(generator, state)
    restore_optimizers = loading(progress.stages, saved.optimizer, names, values)
    take_back = set_extra_states(model, saved.modules)
    try:
        pipe._group.exchange("checkpoint")  # all ranks have checked theirs
    except BaseException:
        take_back()
        raise
    # a signal must not interrupt these changes halfway
    with HeldSignals(), torch.no_grad():
        progress.ended = "a checkpoint was restored only in part"
        for name, tensor in (*parameters.items(), *buffers.items()):
            if name in values:
                tensor.copy_(values[name])
        if progress.stages is None:
            for name, parameter in parameters.items():
                gradient = saved.gradients.get(name)
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
        restore_optimizers()
        progress.batches, progress.versions = saved.history.newest, None
        progress.older = Restored(model, saved.history, _marks(model))
        if clipping is not None and saved.clipping is not None:
            clipping.load(saved.clipping)
        for generator, state in generators:
            generator.set_state(state)
        progress.ended = ""


def _current(pipe: Pipeline, changed: bool) -> History:
    """The current versions, with each parameter under its first name in the model."""
    progress = pipe._engine.progress
    older: Restored | None = progress.older
    if progress.versions is not None:
        from fxpipe.extensions.checkpoint.history import history_of  # needs another extension

        return history_of(progress.versions, _targets(pipe._model), changed=changed)
    if older is not None and not changed:
        return older.history
    return History(progress.batches, progress.batches)


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _targets(model: nn.Module) -> dict[str, str]:
    """Each name of a parameter → its first one."""
    names = _names(model)
    return {name: names[p] for name, p in model.named_parameters(remove_duplicate=False)}


def _marks(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Name → address and version of each parameter that has data here."""
    named = _names(model).items()
    return {name: (p.data_ptr(), p._version) for p, name in named if not p.is_meta}


def _check_history(history: History, parameters: Mapping[str, nn.Parameter]) -> None:
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
