"""A checkpoint's file: tensors as safetensors, everything else as JSON in its header; no pickle."""

from __future__ import annotations

import fcntl
import json
import os
import reprlib
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints
from uuid import uuid4

import safetensors
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from fxpipe.errors import CheckpointError
from fxpipe.runtime.weights.optimizer_state import GroupState, OptimizerState, ParameterState
from fxpipe.runtime.weights.stage_weights import History
from fxpipe.torchtools.pytrees import SPARSE, pieces

FORMAT = 3
"""The format that this version writes. It also reads the earlier ones: 2 had no checksum, and 1 had
no checksum, ``device_random`` or ``extra``."""

_KEY = "fxpipe"
_SUM = "fxpipe.crc32"
_UNFINISHED = ".fxpipe-"
_DEEPEST = 100
_CLASSES = {kind.__name__: kind for kind in (GroupState, History, OptimizerState, ParameterState)}


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
    extra: Any = None


def write(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> None:
    """Write a file; an older one is replaced only once the new one is complete.

    Raises:
        CheckpointError: the file cannot hold a value, or cannot be written.
    """
    tensors = _Tensors()
    try:
        content = {
            part.name: _encode(getattr(checkpoint, part.name), part.name, tensors)
            for part in fields(checkpoint)
        }
        header = json.dumps({"format": FORMAT, "content": content})
        with _replacing(path) as unfinished:
            told = {_KEY: header, _SUM: _checksum(header, tensors.named)}
            save_file(tensors.named, unfinished, told)
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write the checkpoint {str(path)!r}: {why}") from error


@contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a path to write to; if the block succeeds, that file then replaces ``path``.

    It is in a folder of its own beside the file. A writer keeps its folder locked while it lives,
    so that the next writer can recognise and remove the folders of writers that were killed.
    """
    target = Path(os.path.realpath(path))  # of a symbolic link, the file that it points to
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise OSError(f"there is something that is no file; move {str(target)!r} away")
    with suppress(OSError):  # a later writer tries again
        for left in target.parent.glob(f"{_UNFINISHED}*"):
            _remove_left(left)
    while True:
        own = target.with_name(f"{_UNFINISHED}{uuid4().hex}")
        own.mkdir()
        try:
            lock = os.open(own, os.O_DIRECTORY)
        except FileNotFoundError:  # another writer was faster than the lock
            continue
        with suppress(OSError):  # where there are no locks, nobody removes anything
            fcntl.flock(lock, fcntl.LOCK_EX)
        if own.exists():
            break
        os.close(lock)
    try:
        unfinished = own / "checkpoint"
        yield unfinished
        unfinished.chmod(own.stat().st_mode & 0o666)  # the permissions that the umask gives
        _sync(unfinished)
        unfinished.replace(target)
        with suppress(OSError):  # not every file system can sync a folder
            _sync(target.parent)
    finally:
        shutil.rmtree(own, ignore_errors=True)
        os.close(lock)


def _remove_left(folder: Path) -> None:
    """Remove the folder of a writer that no longer runs."""
    with suppress(OSError):
        lock = os.open(folder, os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(lock)


def _sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk, so that they survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a file; no code in it can run.

    Raises:
        CheckpointError: there is no such file, or it is truncated, damaged, no checkpoint, or
            newer.
    """
    shown = repr(str(path))
    try:
        # by its descriptor: header and tensors are of one file, even if it is replaced meanwhile
        with (
            Path(path).open("rb") as opened,
            safetensors.safe_open(f"/dev/fd/{opened.fileno()}", framework="pt") as file,
        ):
            told = file.metadata() or {}
            # copies, which do not change when the file does
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the checkpoint {shown}: {error}") from error
    except (safetensors.SafetensorError, RuntimeError, LookupError, AttributeError) as error:
        raise CheckpointError(
            f"{shown} is no checkpoint, or not all of one ({error}); give a file that "
            "pipe.checkpoint() wrote, as it wrote it"
        ) from error
    if _KEY not in told:
        raise CheckpointError(
            f"{shown} holds tensors, but no checkpoint; give a file that pipe.checkpoint() wrote, "
            "or load a state dict with pipe.load_state_dict()"
        )
    try:
        header = json.loads(told[_KEY])
        if header["format"] > FORMAT:
            raise CheckpointError(
                f"{shown} has format {header['format']}, and this fxpipe reads those up to "
                f"{FORMAT}; install the fxpipe that wrote it"
            )
        summed = _SUM in told or header["format"] > 2
        if summed and told[_SUM] != _checksum(told[_KEY], tensors):
            raise ValueError("its checksum is another")
        content = {name: _decode(value, tensors) for name, value in header["content"].items()}
        made: Checkpoint = _made(Checkpoint, content)
        return made
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{shown} is damaged, or not written by pipe.checkpoint() ({error!r}); restore an "
            "older checkpoint"
        ) from error


def _checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    """The checksum of a file's contents; it detects a few flipped bits for certain."""
    found = zlib.crc32(header.encode())
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


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


class _Tensors:
    """The tensors of a file, each with a storage of its own, as safetensors requires."""

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self._storages: set[int] = set()

    def add(self, name: str, tensor: Tensor) -> dict[str, str]:
        """Add a tensor. Returns its entry in the header: its kind and its name in the file.

        Raises:
            CheckpointError: the file cannot hold it.
        """
        try:
            plain = tensor.detach().resolve_conj().resolve_neg()
            kind = "complex" if plain.is_complex() else "tensor"
            plain = (torch.view_as_real(plain) if plain.is_complex() else plain).cpu().contiguous()
            save({name: plain[:0] if plain.dim() else plain})
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            raise CheckpointError(
                f"{name} is a tensor of a kind that a checkpoint cannot hold ({tensor.layout}, "
                f"{tensor.dtype}, on {tensor.device}); leave it out, or make it a dense one"
            ) from error
        storage = plain.untyped_storage()
        shared = storage.data_ptr() in self._storages
        if shared or storage.nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone()
        self._storages.add(plain.untyped_storage().data_ptr())
        while name in self.named:  # a slash in a key may make two paths equal
            name += "'"
        self.named[name] = plain
        return {kind: name}


def _encode(value: Any, path: str, tensors: _Tensors, depth: int = 0) -> Any:
    """A value as JSON. Each tensor is added to ``tensors`` and replaced by its entry."""
    if depth > _DEEPEST:
        raise CheckpointError(
            f"{path.split('/')[0]} holds itself, or is more than {_DEEPEST} levels deep"
        )

    def inside(item: Any, key: object) -> Any:
        return _encode(item, f"{path}/{key}", tensors, depth + 1)

    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor(layout=layout) if str(layout) in SPARSE:
            coalesced = layout is torch.sparse_coo and value.is_coalesced()
            parts = [inside(piece, index) for index, piece in enumerate(pieces(value.detach()))]
            kind = {"sparse": str(layout), "size": [*value.shape], "coalesced": coalesced}
            return {**kind, "pieces": parts}
        case Tensor():
            return tensors.add(path, value)
        case list() | tuple():
            items = [inside(item, index) for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        case dict():
            pairs = [[inside(key, "key"), inside(item, key)] for key, item in value.items()]
            return {"dict": pairs}
        case _ if type(value) in _CLASSES.values():
            made = {f.name: inside(getattr(value, f.name), f.name) for f in fields(value)}
            return {"class": type(value).__name__, "fields": made}
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold; it holds tensors, "
        "numbers, strings, and lists, tuples and dicts of them"
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
            return {_decode(key, tensors): _decode(item, tensors) for key, item in pairs}
        case {"class": str(name), "fields": dict(inner)}:
            return _made(_CLASSES[name], {k: _decode(v, tensors) for k, v in inner.items()})
        case list():
            return [_decode(item, tensors) for item in value]
        case dict():
            raise ValueError(f"unknown kind of value {sorted(value)}")
    return value
