"""A checkpoint as one file of ``torch.save``: dicts, lists, tensors, numbers and strings.

fxpipe   the format
crc32    the checksums of the tensors, in the order in which the dicts have them
...      the attributes of a Checkpoint; of a part of a folder, those that one process writes
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError, told
from fxpipe.extensions.checkpoint.content import (
    EVERYTHING,
    Checkpoint,
    as_held,
    decode,
    encode,
    in_plain_form,
)
from fxpipe.extensions.checkpoint.replacing import replacing

FORMAT = 6
"""The format that this version writes and reads."""

_KEY, _SUMS = "fxpipe", "crc32"


def write_checkpoint(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> None:
    """Write a file; an older one is replaced only once the new one is complete.

    Raises:
        CheckpointError: the file cannot hold a value, or cannot be written.
    """
    content = packed(checkpoint)
    try:
        with replacing(path) as unfinished:
            torch.save(content, unfinished)
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write the checkpoint {str(path)!r}: {why}") from error


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a file; no code in it can run.

    Raises:
        CheckpointError: there is no such file, or it is truncated, damaged, no checkpoint, or in
            another version's format.
    """
    shown = repr(str(path))
    try:
        opened = Path(path).open("rb")  # noqa: SIM115 - once: another process may replace it
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the checkpoint {shown}: {error}") from error
    with opened as file:
        try:
            content = unpacked(file, shown)
        except CheckpointError:
            raise
        except Exception as error:  # torch and zipfile raise all kinds of errors
            raise CheckpointError(
                f"{shown} is no checkpoint, or not all of one ({told(error)}); give a file that "
                "pipe.checkpoint() wrote, as it wrote it"
            ) from error
    try:
        return decode(content)
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{shown} is damaged, or not written by pipe.checkpoint() ({error!r}); restore an "
            "older checkpoint"
        ) from error


def packed(checkpoint: Checkpoint, parts: Iterable[str] = EVERYTHING) -> dict[str, Any]:
    """What a file has of these attributes of a checkpoint. Raises CheckpointError if it cannot hold
    a value."""
    sums: list[int] = []

    def add(path: tuple[str, ...], tensor: Tensor) -> Tensor:
        held = as_held(path, tensor)
        sums.append(checksum(held))
        return held

    return {_KEY: FORMAT, _SUMS: sums, **encode(checkpoint, add, parts)}


def unpacked(
    source: Path | BinaryIO, shown: str, own: Collection[str] | None = None
) -> dict[str, Any]:
    """Read what was packed, after its checksums; no code in it can run. Raises all kinds of errors
    if it is damaged.

    Args:
        source: the file. Of a path, only what is wanted is read.
        shown: its name in messages.
        own: the names of the parameters and buffers whose tensors are read; None for all. Tensors
            of others are returned on the meta device.
    """
    mapped = isinstance(source, Path)
    with zipfile.ZipFile(source) as records:  # which compares the checksum of what it reads
        records.read(next(name for name in records.namelist() if name.endswith("data.pkl")))
    if not isinstance(source, Path):
        source.seek(0)
    content = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(content, dict) or type(content.get(_KEY)) is not int:
        raise CheckpointError(
            f"{shown} holds tensors, but no checkpoint; give a file that pipe.checkpoint() wrote, "
            "or load a state dict with pipe.load_state_dict()"
        )
    if (format_ := content.pop(_KEY)) != FORMAT:
        raise CheckpointError(
            f"{shown} has format {format_}, and this fxpipe reads format {FORMAT}; restore it with "
            "the fxpipe that wrote it"
        )
    sums = iter(content.pop(_SUMS))

    def checked(path: tuple[str, ...], tensor: Tensor) -> Tensor:
        expected, owner = next(sums), _owner(path)
        if own is not None and owner is not None and owner not in own:
            return torch.empty_like(tensor, device="meta")
        if checksum(tensor) != expected:
            raise ValueError(f"the checksum of its {'/'.join(path)!r} is another")
        return tensor.clone() if mapped else tensor

    return {name: in_plain_form(value, checked, (name,)) for name, value in content.items()}


def checksum(tensor: Tensor) -> int:
    """The CRC-32 of a dense tensor with its dtype and shape. It is certain to detect a few flipped
    bits."""
    head = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    elements = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(elements.numpy().data, head)


def _owner(path: tuple[str, ...]) -> str | None:
    """The name of the parameter or buffer that a tensor in a file belongs to, if any."""
    match path:
        case (
            ("parameters" | "buffers" | "gradients", name)
            | ("optimizer", "parameters", name, *_)
            | ("history", "older", _, name)
        ):
            return name
    return None
