"""A checkpoint and its file: tensors as safetensors, all else as JSON in its header; no pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from fxpipe.errors import CheckpointError
from fxpipe.runtime.history import History
from fxpipe.runtime.optimizer_state import GroupState, OptimizerState, ParameterState

FORMAT = 2
"""Of the files that this version writes. It reads those up to it: 1 had no ``device_random`` and no
``extra``."""

_KEY = "fxpipe"
_CLASSES = {kind.__name__: kind for kind in (GroupState, History, OptimizerState, ParameterState)}


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on, by names in the model: it fits any partition.

    Attributes:
        parameters: name → the newest version.
        buffers: name → value; those that a state dict leaves out, too.
        gradients: name → ``.grad``, where the pipe has no optimizer and adds to them.
        history: the other versions, and how many batches have been trained on.
        optimizer: what the optimizers of all stages keep; None where there are none.
        clipping: what clipping and the scaler of losses have come to; None without them.
        random: the state of torch's generator.
        device_random: CUDA device of the pipe → the state of torch's generator for it.
        extra: what the user has added.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    history: History
    optimizer: OptimizerState | None
    clipping: Mapping[str, Any] | None
    random: Tensor
    device_random: Mapping[str, Tensor] = field(default_factory=dict)
    extra: Any = None


def write(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> None:
    """Write a file, in the place of an older one only when it is whole.

    Raises:
        CheckpointError: a value is of a kind that the file cannot hold, or it cannot be written.
    """
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.part")
    tensors = _Tensors()
    content = {
        part.name: _encode(getattr(checkpoint, part.name), part.name, tensors)
        for part in fields(checkpoint)
    }
    header = json.dumps({"format": FORMAT, "content": content})
    try:
        save_file(tensors.named, unfinished, {_KEY: header})
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(target)
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write the checkpoint {str(path)!r}: {error}") from error


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a file; no code in it can run.

    Raises:
        CheckpointError: there is no such file, or it is truncated, no checkpoint, or newer.
    """
    shown = repr(str(path))
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_KEY)
            # copies: what is read must not change with the file
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {shown}: {error}") from error
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{shown} is no checkpoint, or not all of one ({error}); give a file that "
            "pipe.checkpoint() wrote, as it wrote it"
        ) from error
    if header is None:
        raise CheckpointError(
            f"{shown} holds tensors, but no checkpoint; give a file that pipe.checkpoint() wrote, "
            "or load a state dict with pipe.load_state_dict()"
        )
    try:
        read_ = json.loads(header)
        if read_["format"] > FORMAT:
            raise CheckpointError(
                f"{shown} has format {read_['format']}, and this fxpipe reads those up to "
                f"{FORMAT}; install the fxpipe that wrote it"
            )
        return Checkpoint(**{n: _decode(v, tensors) for n, v in read_["content"].items()})
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{shown} is damaged: its header does not tell what its tensors are ({error!r})"
        ) from error


class _Tensors:
    """The tensors of a file, each in memory that is its own, as safetensors asks."""

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self._storages: set[int] = set()

    def add(self, name: str, tensor: Tensor) -> str:
        """Its name in the file."""
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        shared = storage.data_ptr() in self._storages
        if shared or storage.nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone()
        self._storages.add(plain.untyped_storage().data_ptr())
        while name in self.named:  # a slash in a key may make two paths one
            name += "'"
        self.named[name] = plain
        return name


def _encode(value: Any, path: str, tensors: _Tensors) -> Any:
    """As JSON; a tensor is put aside under its path, and stands there by that name."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.is_complex():
            return {"complex": tensors.add(path, torch.view_as_real(value.detach().resolve_conj()))}
        case Tensor():
            return {"tensor": tensors.add(path, value)}
        case list() | tuple():
            items = [_encode(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        case dict():
            pairs = [
                [_encode(key, f"{path}/key", tensors), _encode(item, f"{path}/{key}", tensors)]
                for key, item in value.items()
            ]
            return {"dict": pairs}
        case _ if type(value) in _CLASSES.values():
            inner = {f.name: getattr(value, f.name) for f in fields(value)}
            made = {k: _encode(v, f"{path}/{k}", tensors) for k, v in inner.items()}
            return {"class": type(value).__name__, "fields": made}
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold; it holds tensors, "
        "numbers, strings, and lists, tuples and dicts of them"
    )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What ``_encode`` was given."""
    match value:
        case {"tensor": str(path)}:
            return tensors[path]
        case {"complex": str(path)}:
            return torch.view_as_complex(tensors[path])
        case {"tuple": list(items)}:
            return tuple(_decode(item, tensors) for item in items)
        case {"dict": list(pairs)}:
            return {_decode(key, tensors): _decode(item, tensors) for key, item in pairs}
        case {"class": str(name), "fields": dict(inner)}:
            return _CLASSES[name](**{k: _decode(v, tensors) for k, v in inner.items()})
        case list():
            return [_decode(item, tensors) for item in value]
        case dict():
            raise ValueError(f"unknown kind of value {sorted(value)}")
    return value
