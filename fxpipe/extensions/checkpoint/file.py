"""A checkpoint as one file of ``torch.save``: dicts, lists, tensors, numbers and strings."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from fxpipe.errors import CheckpointError, told
from fxpipe.extensions.checkpoint.content import (
    Checkpoint,
    as_held,
    decode,
    encode,
    refuse_others,
    unpickled,
)
from fxpipe.extensions.checkpoint.replacing import replacing

FORMAT = 5
"""The format that this version writes and reads."""

_KEY = "fxpipe"


def write_checkpoint(
    checkpoint: Checkpoint, path: str | os.PathLike[str], *, shared: bool = False
) -> None:
    """Write a file; an older one is replaced only once the new one is complete. Only this user may
    read it, unless ``shared`` asks for the permissions of the umask.

    Raises:
        CheckpointError: the file cannot hold a value, or cannot be written.
    """
    content = {_KEY: FORMAT, **encode(checkpoint, as_held)}
    try:
        with replacing(path, shared=shared) as unfinished:
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
            content = unpickled(file)
        except Exception as error:  # torch and zipfile raise all kinds of errors
            raise CheckpointError(
                f"{shown} is no checkpoint, or not all of one ({told(error)}); give a file that "
                "pipe.checkpoint() wrote, as it wrote it"
            ) from error
    if not isinstance(content, dict) or type(content.get(_KEY)) is not int:
        raise CheckpointError(
            f"{shown} holds tensors, but no checkpoint; give a file that pipe.checkpoint() wrote, "
            "or load a state dict with pipe.load_state_dict()"
        )
    refuse_others(content.pop(_KEY), FORMAT, shown)
    try:
        return decode(content)
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{shown} is damaged, or not written by pipe.checkpoint() ({error!r}); restore an "
            "older checkpoint"
        ) from error
