"""What a checkpoint holds, and its form: JSON that names tensors; no pickle."""

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
from fxpipe.runtime.weights.stage_weights import History, Versions
from fxpipe.torchtools.pytrees import SPARSE, pieces

_DEEPEST = 100
_ADDED = ("attributes", "modules")
"""Fields that were added without a new format."""

_CLASSES = {
    kind.__name__: kind for kind in (GroupState, History, OptimizerState, ParameterState, Parts)
}


@dataclass(frozen=True)
class Checkpoint:
    """All that training needs to go on, by names in the model, so that it fits any partition.

    Attributes:
        parameters: name → the newest version.
        buffers: name → value; non-persistent buffers, too.
        gradients: name → ``.grad``, where the pipe has no optimizer and adds to it.
        history: the other versions, and how many batches have been trained on.
        optimizer: the state of all stages' optimizers; None where there are none.
        clipping: the state of clipping and of the gradient scaler; None without them.
        random: the state of torch's generator.
        device_random: CUDA device of the pipe → the state of torch's generator for it.
        modules: name of a module → the extra state that it keeps in state dicts.
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
        """The same with these parameters and buffers alone, and what is kept for them."""

        def chosen(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in values.items() if name in names}

        def versions(values: Versions) -> Versions:
            return {version: chosen(tensors) for version, tensors in values.items()}

        own, optimizer = self.history, self.optimizer
        if optimizer is not None:
            optimizer = replace(optimizer, parameters=chosen(optimizer.parameters))
        return replace(
            self,
            parameters=chosen(self.parameters),
            buffers=chosen(self.buffers),
            gradients=chosen(self.gradients),
            history=replace(own, older=versions(own.older), predicted=versions(own.predicted)),
            optimizer=optimizer,
        )

    @property
    def shards(self) -> OptimizerState | None:
        """The parts of the optimizers' state that other processes have others of."""
        if self.optimizer is None:
            return None
        found = {
            name: replace(each, state={k: v for k, v in each.state.items() if isinstance(v, Parts)})
            for name, each in self.optimizer.parameters.items()
        }
        return replace(self.optimizer, parameters={k: v for k, v in found.items() if v.state})


EVERYTHING = tuple(part.name for part in fields(Checkpoint))
"""The attributes of a checkpoint."""

Add = Callable[[tuple[str, ...], Tensor], dict[str, str]]
"""Adds a tensor to a checkpoint: from its path to its entry in the JSON, its kind and its name."""


def encode(checkpoint: Checkpoint, add: Add, parts: Iterable[str] = EVERYTHING) -> dict[str, Any]:
    """These parts of a checkpoint as JSON, which names the tensors that ``add`` was given. Raises
    CheckpointError where it holds a value of a kind that has no such form."""
    names = [part.name for part in _written_fields(checkpoint) if part.name in parts]
    return {name: _encode(getattr(checkpoint, name), (name,), add) for name in names}


def _written_fields(value: Any) -> list[Field[Any]]:
    """The fields of a dataclass, without those that older versions do not know and that are
    empty."""
    return [f for f in fields(value) if f.name not in _ADDED or getattr(value, f.name)]


def decode(contents: Iterable[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> Checkpoint:
    """The checkpoint that ``encode`` was given, joined where several processes had parts of it.

    Args:
        contents: what ``encode`` has made; the first has all attributes.
        tensors: name → the tensor that was added under this name.

    Raises:
        LookupError, TypeError, ValueError, AttributeError, RuntimeError: it is damaged.
    """
    decoded = ({k: _decode(value, tensors) for k, value in each.items()} for each in contents)
    made: Checkpoint = _made(Checkpoint, functools.reduce(_joined, decoded))
    return made if made.optimizer is None else replace(made, optimizer=_whole(made.optimizer))


def _whole(optimizer: OptimizerState) -> OptimizerState:
    """The same with whole tensors for their parts."""
    parameters = {
        name: replace(
            each, state={k: v.whole() if isinstance(v, Parts) else v for k, v in each.state.items()}
        )
        for name, each in optimizer.parameters.items()
    }
    return replace(optimizer, parameters=parameters)


def _joined(one: Any, other: Any) -> Any:
    """What two processes have kept of the same; where both have a value, it is the first one's."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = {key: _joined(one[key], other[key]) for key in one if key in other}
        return {**one, **other, **both}
    if isinstance(one, History) and isinstance(other, History):
        older, predicted = _joined(one.older, other.older), _joined(one.predicted, other.predicted)
        return replace(one, older=older, predicted=predicted)
    if isinstance(one, OptimizerState) and isinstance(other, OptimizerState):
        shifted = {
            name: replace(each, group=each.group + len(one.groups))
            for name, each in other.parameters.items()
        }
        both = {
            name: replace(each, state=_joined(each.state, shifted[name].state))
            for name, each in one.parameters.items()
            if name in shifted
        }
        known = {**shifted, **one.parameters, **both}
        return OptimizerState([*one.groups, *other.groups], known)
    if isinstance(one, Parts) and isinstance(other, Parts):
        return replace(one, tensors=_joined(one.tensors, other.tensors))
    return one


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Name of a module → what its ``get_extra_state`` returns, of those that have it."""
    return {name: module.get_extra_state() for name, module in _having(model).items()}


def set_extra_states(model: nn.Module, saved: Mapping[str, Any]) -> Callable[[], None]:
    """Give modules the extra state of a checkpoint. One that the checkpoint does not name keeps its
    own. Returns a function that takes it back.

    Raises:
        CheckpointError: a module is missing, or does not take its state. All have their own then.
    """
    having = _having(model)
    before = {name: having[name].get_extra_state() for name in saved if name in having}

    def take_back() -> None:
        for name, state in before.items():
            having[name].set_extra_state(state)

    for name in saved:
        if name not in having:
            raise CheckpointError(
                f"the checkpoint is of another model: its module {name!r} has extra state, and the "
                "pipe's has no get_extra_state()"
            )
    for name, state in saved.items():
        try:
            having[name].set_extra_state(state)
        except Exception as error:
            take_back()
            raise CheckpointError(
                f"module {name!r} does not take the extra state of the checkpoint ({told(error)}); "
                "restore one that was made with this set_extra_state()"
            ) from error
    return take_back


def _having(model: nn.Module) -> dict[str, nn.Module]:
    own = nn.Module.get_extra_state
    return {n: m for n, m in model.named_modules() if type(m).get_extra_state is not own}


def checksum(name: str, tensor: Tensor, start: int = 0) -> int:
    """The CRC-32 of a dense tensor with its name, dtype and shape, going on from ``start``; it
    detects a few flipped bits for certain.

    Raises:
        RuntimeError, TypeError, ValueError: the tensor has no elements that could be written.
    """
    if tensor.is_quantized:  # its elements could be written, but not how they are to be read
        raise TypeError("quantised")
    found = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), start)
    elements = tensor.contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(elements.numpy().data, found)


def refused(name: str, tensor: Tensor) -> CheckpointError:
    """The error for a tensor that a checkpoint cannot hold."""
    return CheckpointError(
        f"{name} is a tensor of a kind that a checkpoint cannot hold ({tensor.layout}, "
        f"{tensor.dtype}, on {tensor.device}); leave it out, or give dense tensors in its place"
    )


def _encode(value: Any, path: tuple[str, ...], add: Add) -> Any:
    """A value as JSON. Each tensor is added and replaced by its entry."""
    if len(path) > 1 + _DEEPEST:
        raise CheckpointError(f"{path[0]} holds itself, or is more than {_DEEPEST} levels deep")

    def inside(item: Any, key: object) -> Any:
        return _encode(item, (*path, str(key)), add)

    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor(layout=layout) if str(layout) in SPARSE:
            coalesced = layout is torch.sparse_coo and value.is_coalesced()
            parts = [inside(piece, index) for index, piece in enumerate(pieces(value.detach()))]
            kind = {"sparse": str(layout), "size": [*value.shape], "coalesced": coalesced}
            return {**kind, "pieces": parts}
        case Tensor():
            return add(path, value)
        case list() | tuple():
            items = [inside(item, index) for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        case dict():
            pairs = [[inside(key, "key"), inside(item, key)] for key, item in value.items()]
            return {"dict": pairs}
        case _ if type(value) in _CLASSES.values():
            made = {f.name: inside(getattr(value, f.name), f.name) for f in _written_fields(value)}
            return {"class": type(value).__name__, "fields": made}
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
        case {"sparse": str(kind), "size": list(size), "coalesced": bool(sorted_), "pieces": parts}:
            return _sparse(kind, [_decode(each, tensors) for each in parts], size, sorted_)
        case {"tuple": list(items)}:
            return tuple(_decode(item, tensors) for item in items)
        case {"dict": list(pairs)}:
            made = {_decode(key, tensors): _decode(item, tensors) for key, item in pairs}
            if len(made) < len(pairs):
                raise ValueError("two items have the same key")
            return made
        case {"class": str(name), "fields": dict(inner)}:
            return _made(_CLASSES[name], {k: _decode(v, tensors) for k, v in inner.items()})
        case list():
            return [_decode(item, tensors) for item in value]
        case dict():
            raise ValueError(f"unknown kind of value {sorted(value)}")
    return value


def _made(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """A dataclass from values that were read. Raises ValueError where a value has a wrong type."""
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
        return any(_fits(value, each) for each in inner)
    if origin is Mapping:
        return isinstance(value, dict) and all(
            _fits(key, inner[0]) and _fits(item, inner[1]) for key, item in value.items()
        )
    if origin is Sequence:
        return isinstance(value, list | tuple) and all(_fits(item, inner[0]) for item in value)
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def _sparse(layout: str, parts: Sequence[Tensor], size: list[int], coalesced: bool) -> Tensor:
    """A sparse tensor from its parts. Raises RuntimeError where they do not fit together."""
    if SPARSE[layout] is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices, values, size, is_coalesced=coalesced, check_invariants=True
        )
    rows, columns, values = parts
    return torch.sparse_compressed_tensor(
        rows, columns, values, size, layout=SPARSE[layout], check_invariants=True
    )
