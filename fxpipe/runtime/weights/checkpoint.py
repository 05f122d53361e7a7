"""The contents of a checkpoint, and their form: JSON that names tensors, without pickles."""

from __future__ import annotations

import functools
import reprlib
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from fxpipe.errors import CheckpointError, told
from fxpipe.runtime.weights.optimizer_state import (
    GroupState,
    OptimizerState,
    ParameterState,
    Parts,
)
from fxpipe.runtime.weights.stage_weights import History

_DEEPEST = 100
_ADDED = ("attributes", "modules")
"""Fields that were added without a new format; they are written only if they are not empty."""

_CLASSES = {
    kind.__name__: kind for kind in (GroupState, History, OptimizerState, ParameterState, Parts)
}


@dataclass(frozen=True)
class Checkpoint:
    """All that training needs to go on, by names in the model, so that it fits any partition.

    Attributes:
        parameters: name → the newest version.
        buffers: name → value; non-persistent buffers, too.
        gradients: name → ``.grad``, if the pipe has no optimizer and accumulates into it.
        history: the other versions, and how many batches have been trained on.
        optimizer: the state of all stages' optimizers; None without optimizers.
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

    def part(self, names: Collection[str]) -> Checkpoint:
        """The same with only these parameters and buffers, and their gradients, versions and
        optimizer states."""

        def chosen(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in values.items() if name in names}

        optimizer = self.optimizer
        if optimizer is not None:
            optimizer = replace(optimizer, parameters=chosen(optimizer.parameters))
        return replace(
            self,
            parameters=chosen(self.parameters),
            buffers=chosen(self.buffers),
            gradients=chosen(self.gradients),
            history=self.history.renamed({name: name for name in names}),
            optimizer=optimizer,
        )

    @property
    def shards(self) -> OptimizerState | None:
        """The tensors of the optimizers' state of which this process has only a part."""
        if self.optimizer is None:
            return None
        parameters = {
            name: replace(kept, state={k: v for k, v in kept.state.items() if isinstance(v, Parts)})
            for name, kept in self.optimizer.parameters.items()
        }
        return replace(self.optimizer, parameters={k: v for k, v in parameters.items() if v.state})


EVERYTHING = tuple(part.name for part in fields(Checkpoint))
"""The attributes of a checkpoint."""

Add = Callable[[tuple[str, ...], Tensor], dict[str, str]]
"""Adds a tensor to a checkpoint: (path, tensor) → its entry in the JSON, {kind: name}."""


def encode(checkpoint: Checkpoint, add: Add, parts: Iterable[str] = EVERYTHING) -> dict[str, Any]:
    """Turn these attributes of a checkpoint into JSON that names tensors, each of which is passed
    to ``add``. Raises CheckpointError for a value that has no such form."""
    names = [part.name for part in _written_fields(checkpoint) if part.name in parts]
    return {name: _encode(getattr(checkpoint, name), (name,), add) for name in names}


def _written_fields(value: Any) -> list[Field[Any]]:
    return [f for f in fields(value) if f.name not in _ADDED or getattr(value, f.name)]


def decode(contents: Iterable[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> Checkpoint:
    """The checkpoint that was encoded, joined from the parts that several processes had.

    Args:
        contents: process → what ``encode`` returned; the first has all attributes.
        tensors: name → tensor.

    Raises:
        LookupError, TypeError, ValueError, AttributeError, RuntimeError: it is damaged.
    """
    decoded = ({k: _decode(value, tensors) for k, value in part.items()} for part in contents)
    result: Checkpoint = _build(Checkpoint, functools.reduce(_joined, decoded))
    if result.optimizer is None:
        return result
    whole = {
        name: replace(
            kept, state={k: v.whole() if isinstance(v, Parts) else v for k, v in kept.state.items()}
        )
        for name, kept in result.optimizer.parameters.items()
    }
    return replace(result, optimizer=replace(result.optimizer, parameters=whole))


def _joined(a: Any, b: Any) -> Any:
    """Join what two processes have of a value; if both have it whole, return the first one's."""
    match a, b:
        case dict(), dict():
            return {**a, **b, **{key: _joined(a[key], b[key]) for key in a if key in b}}
        case History(), History():
            older, predicted = _joined(a.older, b.older), _joined(a.predicted, b.predicted)
            return replace(a, older=older, predicted=predicted)
        case ParameterState(), ParameterState():
            return replace(a, state=_joined(a.state, b.state))
        case OptimizerState(), OptimizerState():
            shifted = {
                name: replace(kept, group=kept.group + len(a.groups))
                for name, kept in b.parameters.items()
            }
            return OptimizerState([*a.groups, *b.groups], _joined(a.parameters, shifted))
        case Parts(), Parts():
            return replace(a, tensors=_joined(a.tensors, b.tensors))
    return a


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


def checksum(name: str, tensor: Tensor, start: int = 0) -> int:
    """The CRC-32 of a dense tensor with its name, dtype and shape, continued from ``start``. It is
    certain to detect a few flipped bits.

    Raises:
        RuntimeError, TypeError, ValueError: the tensor's elements cannot be written.
    """
    if tensor.is_quantized:  # its integers could be written, but not their scale
        raise TypeError("quantised")
    head = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), start)
    elements = tensor.contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(elements.numpy().data, head)


def refused(name: str, tensor: Tensor) -> CheckpointError:
    """The error for a tensor that a checkpoint cannot hold."""
    return CheckpointError(
        f"{name} is a tensor of a kind that a checkpoint cannot hold ({tensor.layout}, "
        f"{tensor.dtype}, on {tensor.device}); leave it out, or give dense tensors in its place"
    )


def _encode(value: Any, path: tuple[str, ...], add: Add) -> Any:
    """A value as JSON, in which each tensor is replaced by the entry that ``add`` returns."""
    if len(path) > 1 + _DEEPEST:
        raise CheckpointError(f"{path[0]} holds itself, or is more than {_DEEPEST} levels deep")

    def inside(item: Any, key: object) -> Any:
        return _encode(item, (*path, str(key)), add)

    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            return add(path, value)
        case list() | tuple():
            items = [inside(item, index) for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        case dict():
            pairs = [[inside(key, "key"), inside(item, key)] for key, item in value.items()]
            return {"dict": pairs}
        case _ if type(value) in _CLASSES.values():
            inner = {f.name: inside(getattr(value, f.name), f.name) for f in _written_fields(value)}
            return {"class": type(value).__name__, "fields": inner}
    raise CheckpointError(
        f"{'/'.join(path)} is a {type(value).__name__}, which a checkpoint cannot hold; it holds "
        "tensors, numbers, strings, and lists, tuples and dicts of them"
    )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that ``_encode`` was given."""
    match value:
        case {"tensor": str(path)}:
            return tensors[path]
        case {"complex": str(path)}:
            return torch.view_as_complex(tensors[path])
        case {"tuple": list(items)}:
            return tuple(_decode(item, tensors) for item in items)
        case {"dict": list(pairs)}:
            decoded = {_decode(key, tensors): _decode(item, tensors) for key, item in pairs}
            if len(decoded) < len(pairs):
                raise ValueError("two items have the same key")
            return decoded
        case {"class": str(name), "fields": dict(inner)}:
            return _build(_CLASSES[name], {k: _decode(v, tensors) for k, v in inner.items()})
        case list():
            return [_decode(item, tensors) for item in value]
        case dict():
            raise ValueError(f"unknown kind of value {sorted(value)}")
    return value


def _build(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Make a dataclass of values that were read. Raises ValueError if one has a wrong type."""
    for name, hint in get_type_hints(kind).items():
        if name in values and not _fits(values[name], hint):
            raise ValueError(f"{name!r} of its {kind.__name__} is {reprlib.repr(values[name])}")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the declared type of a field."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in inner)
    if origin is Mapping:
        return isinstance(value, dict) and all(
            _fits(key, inner[0]) and _fits(item, inner[1]) for key, item in value.items()
        )
    if origin is Sequence:
        return isinstance(value, list | tuple) and all(_fits(item, inner[0]) for item in value)
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))
