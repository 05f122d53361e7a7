"""The contents of a checkpoint, and their form: nested dicts, lists and tuples of tensors, numbers
and strings, which ``torch.load`` reads without running any code."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from fxpipe.errors import CheckpointError, told

_DEEPEST = 100
_MOST_BITS = 2040
"""Of whole numbers that ``torch.load`` reads."""


@dataclass(frozen=True)
class ParameterState:
    """The optimizer state of one parameter.

    Attributes:
        group: the index of its parameter group.
        state: the optimizer's state for the parameter.
    """

    group: int
    state: Mapping[Any, Any]


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer.

    Attributes:
        kind: its class.
        groups: the settings of its parameter groups.
        parameters: name in the model → the state of that parameter.
    """

    kind: str
    groups: Sequence[Mapping[str, Any]]
    parameters: Mapping[str, ParameterState]


@dataclass(frozen=True)
class History:
    """The versions that later batches may read, while no batch is in flight.

    Attributes:
        newest: the newest version: how many batches have updated the weights. Its values are the
            model's own parameters.
        base: the oldest version that can be read; batches that ask for an older one read this one.
        older: version before the newest → name → value.
    """

    newest: int
    base: int
    older: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)


_CLASSES = (History, OptimizerState, ParameterState)


@dataclass(frozen=True)
class Checkpoint:
    """All that training needs to go on, by names in the model, so that it fits any partition.

    Attributes:
        parameters: name → the newest version.
        buffers: name → value; non-persistent buffers, too.
        gradients: name → ``.grad``, if the pipe has no optimizer and accumulates into it.
        history: the other versions, and how many batches have been trained on.
        optimizer: the state of the whole optimizer; None without one.
        clipping: the state of clipping and of the gradient scaler; None without them.
        random: the state of torch's generator for the CPU.
        device_random: CUDA device of the pipe → the state of torch's generator for it.
        modules: name of a module → its extra state, see ``nn.Module.get_extra_state``.
        extra: the user's own values.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    history: History
    optimizer: OptimizerState | None
    clipping: Mapping[str, Any] | None
    random: Tensor
    device_random: Mapping[str, Tensor] = field(default_factory=dict)
    modules: Mapping[str, Any] = field(default_factory=dict)
    extra: Any = None

    def changed(self, change: Callable[[str, Tensor], Tensor]) -> Checkpoint:
        """The same with other tensors for parameters, and for what belongs to one: (its name, the
        tensor) → a tensor."""

        def of(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: change(name, value) for name, value in values.items()}

        optimizer = self.optimizer
        if optimizer is not None:
            states = {
                name: replace(
                    each,
                    state={
                        key: change(name, value) if isinstance(value, Tensor) else value
                        for key, value in each.state.items()
                    },
                )
                for name, each in optimizer.parameters.items()
            }
            optimizer = replace(optimizer, parameters=states)
        older = {version: of(tensors) for version, tensors in self.history.older.items()}
        return replace(
            self,
            parameters=of(self.parameters),
            gradients=of(self.gradients),
            history=replace(self.history, older=older),
            optimizer=optimizer,
        )

    def part(self, names: Collection[str]) -> Checkpoint:
        """The same with only these parameters and buffers, and their gradients, versions and
        optimizer states."""

        def chosen(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in values.items() if name in names}

        older = {version: chosen(tensors) for version, tensors in self.history.older.items()}
        optimizer = self.optimizer
        if optimizer is not None:
            optimizer = replace(optimizer, parameters=chosen(optimizer.parameters))
        return replace(
            self,
            parameters=chosen(self.parameters),
            buffers=chosen(self.buffers),
            gradients=chosen(self.gradients),
            history=replace(self.history, older=older),
            optimizer=optimizer,
        )


EVERYTHING = tuple(part.name for part in fields(Checkpoint))
"""The attributes of a checkpoint."""

Change = Callable[[tuple[str, ...], Tensor], Tensor]
"""What stands for a tensor: (its path in the checkpoint, the tensor) → a tensor."""


def in_plain_form(value: Any, change: Change, path: tuple[str, ...] = ()) -> Any:
    """A value with dicts in place of dataclasses, and with its tensors changed: what
    ``torch.load`` reads without running code. Raises CheckpointError if there is no such form."""

    def inside(item: Any, key: object) -> Any:
        return in_plain_form(item, change, (*path, str(key)[:_DEEPEST]))

    if len(path) > _DEEPEST:
        raise CheckpointError(f"{path[0]} holds itself, or is more than {_DEEPEST} levels deep")
    match value:
        case None | bool():
            return value
        case int() if value.bit_length() < _MOST_BITS:
            return int(value)
        case float():
            return float(value)
        case str():
            return str(value)
        case Tensor():
            return change(path, value)
        case list():
            return [inside(item, index) for index, item in enumerate(value)]
        case tuple():
            return tuple([inside(item, index) for index, item in enumerate(value)])
        case dict():
            return {inside(key, "key"): inside(item, key) for key, item in value.items()}
        case _ if type(value) in _CLASSES:
            return {f.name: inside(getattr(value, f.name), f.name) for f in fields(value)}
    raise CheckpointError(
        f"{'/'.join(path)} is a {type(value).__name__}, which a checkpoint cannot hold; it holds "
        "tensors, numbers, strings, and lists, tuples and dicts of them"
    )


def encode(checkpoint: Checkpoint, change: Change, parts: Iterable[str] = EVERYTHING) -> Any:
    """Turn these attributes of a checkpoint into plain dicts; see ``in_plain_form``."""
    return {name: in_plain_form(getattr(checkpoint, name), change, (name,)) for name in parts}


def decode(content: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint that was encoded.

    Raises:
        LookupError, TypeError, AttributeError, RuntimeError: it is damaged.
    """
    optimizer = content["optimizer"]
    if optimizer is not None:
        parameters = {name: ParameterState(**p) for name, p in optimizer["parameters"].items()}
        optimizer = OptimizerState(**{**optimizer, "parameters": parameters})
    history = History(**content["history"])
    rest = {name: content[name] for name in EVERYTHING}
    return Checkpoint(**{**rest, "history": history, "optimizer": optimizer})


def as_held(path: tuple[str, ...], tensor: Tensor) -> Tensor:
    """A tensor as a checkpoint holds it: a ``Change``. Raises CheckpointError if it cannot."""
    value = tensor.detach()
    dense = value.layout is torch.strided and not value.is_quantized
    if type(value) is not Tensor or not dense or value.is_meta:
        raise CheckpointError(
            f"{'/'.join(path)} is a tensor of a kind that a checkpoint cannot hold "
            f"({tensor.layout}, {tensor.dtype}, on {tensor.device}); leave it out, or give dense "
            "tensors in its place"
        )
    value = value.resolve_conj().resolve_neg()
    alone = value.untyped_storage().nbytes() == value.nbytes
    return value if alone else value.clone()  # of a view, a file would have all memory


def unpickled(file: BinaryIO) -> Any:
    """Read what ``torch.save`` wrote, after its checksums; no code in it can run. Raises all kinds
    of errors if it is damaged."""
    damaged = zipfile.ZipFile(file).testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of its {damaged!r} is another")
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def refuse_others(format_: int, known: int, shown: str) -> None:
    """Raises CheckpointError if another version of this library wrote a checkpoint."""
    if format_ != known:
        raise CheckpointError(
            f"{shown} has format {format_}, and this fxpipe reads format {known}; restore it with "
            "the fxpipe that wrote it"
        )


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Name → extra state, of the modules that have a ``get_extra_state``."""
    return {name: module.get_extra_state() for name, module in _having(model).items()}


def set_extra_states(model: nn.Module, saved: Mapping[str, Any]) -> Callable[[], None]:
    """Set the extra state of the modules that a checkpoint names. Returns a function that restores
    their earlier state.

    Raises:
        CheckpointError: a module is missing, or does not take its state. Nothing has changed then.
    """
    modules = _having(model)
    before = {name: modules[name].get_extra_state() for name in saved if name in modules}

    def take_back() -> None:
        for name, state in before.items():
            modules[name].set_extra_state(state)

    for name in saved:
        if name not in modules:
            raise CheckpointError(
                f"the checkpoint is of another model: its module {name!r} has extra state, and the "
                "pipe's has no get_extra_state()"
            )
    for name, state in saved.items():
        try:
            modules[name].set_extra_state(state)
        except Exception as error:
            take_back()
            raise CheckpointError(
                f"module {name!r} does not take the extra state of the checkpoint ({told(error)}); "
                "restore one that was made with this set_extra_state()"
            ) from error
    return take_back


def _having(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that override ``get_extra_state``, by name."""
    default = nn.Module.get_extra_state
    return {n: m for n, m in model.named_modules() if type(m).get_extra_state is not default}
