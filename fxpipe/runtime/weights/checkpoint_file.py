"""A checkpoint as one file: tensors as safetensors, everything else as JSON in its header."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from fxpipe.errors import CheckpointError
from fxpipe.runtime.weights.checkpoint import Checkpoint, checksum, decode, encode, refused
from fxpipe.runtime.weights.replacing import replacing

FORMAT = 3
"""The format that this version writes. It also reads formats 2, without a checksum, and 1, without
checksum, ``device_random`` and ``extra``."""

_KEY = "fxpipe"
_SUM = "fxpipe.crc32"


def write(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> None:
    """Write a file; an older one is replaced only once the new one is complete.

    Raises:
        CheckpointError: the file cannot hold a value, or cannot be written.
    """
    tensors = _Tensors()
    try:
        header = json.dumps({"format": FORMAT, "content": encode(checkpoint, tensors.add)})
        with replacing(path) as unfinished:
            told = {_KEY: header, _SUM: _checksum(header, tensors.named)}
            save_file(tensors.named, unfinished, told)
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write the checkpoint {str(path)!r}: {why}") from error


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a file; no code in it can run.

    Raises:
        CheckpointError: there is no such file, or it is truncated, damaged, no checkpoint, or in a
            newer format.
    """
    shown = repr(str(path))
    try:
        # by descriptor, so that header and tensors are of one file even if it is replaced meanwhile
        with (
            Path(path).open("rb") as opened,
            safetensors.safe_open(f"/dev/fd/{opened.fileno()}", framework="pt") as file,
        ):
            told = file.metadata() or {}
            # copies, as the tensors are mapped from the file and would change with it
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
        return decode([header["content"]], tensors)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{shown} is damaged, or not written by pipe.checkpoint() ({error!r}); restore an "
            "older checkpoint"
        ) from error


def _checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    total = zlib.crc32(header.encode())
    for name, tensor in sorted(tensors.items()):
        total = checksum(name, tensor, total)
    return f"{total:08x}"


class _Tensors:
    """The tensors of a file, each with a storage of its own, as safetensors requires."""

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self._storages: set[int] = set()

    def add(self, path: tuple[str, ...], tensor: Tensor) -> dict[str, str]:
        """Add a tensor, see ``Add``. Raises CheckpointError if the file cannot hold it."""
        name = "/".join(path)
        try:
            plain = tensor.detach().resolve_conj().resolve_neg()
            kind = "complex" if plain.is_complex() else "tensor"
            plain = (torch.view_as_real(plain) if plain.is_complex() else plain).cpu().contiguous()
            save({name: plain[:0] if plain.dim() else plain})
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            raise refused(name, tensor) from error
        storage = plain.untyped_storage()
        shared = storage.data_ptr() in self._storages
        if shared or storage.nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone()
        self._storages.add(plain.untyped_storage().data_ptr())
        while name in self.named:  # a slash in a key may make two paths equal
            name += "'"
        self.named[name] = plain
        return {kind: name}
