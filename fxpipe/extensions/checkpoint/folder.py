"""A checkpoint as a folder that many processes write: a file for each that has a part of it.

Every tensor has a path that does not depend on the process that wrote it, so any process can read
the tensors that it needs out of all files. A file is as ``pipe.checkpoint()`` writes it, with the
attributes of which its process has a part, and with ``of``, a word that all files of the folder
have, and ``ranks``, the numbers of the processes that wrote one, such as ``0.pt``.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import CheckpointError, told
from fxpipe.extensions.checkpoint.content import EVERYTHING, Checkpoint, decode
from fxpipe.extensions.checkpoint.file import packed, unpacked
from fxpipe.extensions.checkpoint.replacing import replacing, standing, sync
from fxpipe.runtime.group import Group

_SHARED = ("parameters", "buffers", "gradients", "history", "optimizer")
"""The attributes of which each process writes a part. The first process writes all others."""

Folder = str | os.PathLike[str]


def write(checkpoint: Checkpoint, path: Folder, group: Group) -> None:
    """Write a folder; an older one is replaced only once the new one is complete.

    Args:
        checkpoint: this process's part of the checkpoint.
        path: the folder, which all processes can reach.
        group: the processes; each of them calls this inside of ``calling``. Those of the first
            replica write everything, the others only the states that it has not.

    Raises:
        CheckpointError: the folder cannot be written, or cannot hold a value. An older folder stays
            as it is.
    """
    try:
        optimizer, parts = checkpoint.optimizer, _SHARED if group.rank else EVERYTHING
        states = {} if optimizer is None else optimizer.parameters
        stated = {name for name, kept in states.items() if kept.state}
        known = group.exchange("states", (group.replica, stated))
        new = [stated.difference(*(s for _, s in known[:i])) for i, (_, stated) in enumerate(known)]
        ranks = [rank for rank, (replica, _) in enumerate(known) if new[rank] or not replica]
        if group.replica and optimizer is not None:
            optimizer = replace(optimizer, parameters={n: states[n] for n in new[group.rank]})
            checkpoint, parts = replace(checkpoint, optimizer=optimizer), ("optimizer",)
        content = packed(checkpoint, parts) if group.rank in ranks else {}
        with ExitStack() as stack:
            unfinished = None
            if group.rank == 0:
                _refuse_others(path)
                unfinished = stack.enter_context(replacing(path, folder=True))
                unfinished.mkdir()
            told = group.exchange("folder", unfinished and str(unfinished))
            if content:
                content |= {"of": Path(told[0]).parent.name, "ranks": ranks}
                _write_part(content, Path(told[0], f"{group.rank}.pt"))
            group.exchange("files", None)
            if unfinished is not None:
                _refuse_missing(unfinished, ranks)
        group.exchange("checkpoint", None)  # return only once the folder is in place
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write the checkpoint {str(path)!r}: {why}") from error


def _refuse_others(path: Folder) -> None:
    """Raises OSError if replacing a folder would remove more than a checkpoint."""
    folder = Path(os.path.realpath(path))
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix != ".pt" or not file.stem.isdecimal():
            raise OSError(
                f"it holds {file.name!r}, which is no part of a checkpoint; give a folder of its "
                "own"
            )


def _write_part(content: dict[str, Any], file: Path) -> None:
    torch.save(content, file)
    sync(file)


def _refuse_missing(folder: Path, ranks: list[int]) -> None:
    """Raises OSError if the file of a process is not there."""
    for rank in ranks:
        if not (folder / f"{rank}.pt").exists():
            raise OSError(
                f"the file of rank {rank} is not there; give a folder that all of them reach under "
                "the same path"
            )


def exists(path: Folder) -> bool:
    """Whether there is a file, or a folder that is not empty, to read a checkpoint from. Raises
    CheckpointError if the path cannot be looked up, as one that is too long."""
    try:
        folder = standing(path)
        return any(folder.iterdir()) if folder.is_dir() else folder.exists()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the checkpoint {str(path)!r}: {error}") from error


def read(path: Folder, own: Collection[str] | None = None) -> Checkpoint:
    """Read a folder; no code in it can run.

    Args:
        path: the folder.
        own: the names of the parameters and buffers whose tensors are read; None for all. Tensors
            of others are returned on the meta device.

    Raises:
        CheckpointError: there is no such folder, or it is incomplete, damaged, no checkpoint, or in
            another version's format.
    """
    shown, folder = repr(str(path)), standing(path)
    if not (folder / "0.pt").exists():
        hint = "; pipe.restore() reads the files of pipe.checkpoint()" if folder.is_file() else ""
        if (folder / ".metadata").exists():
            hint = "; torch.distributed.checkpoint wrote it, or an fxpipe that used that"
        raise CheckpointError(
            f"cannot read the checkpoint {shown}: it is no folder with a file '0.pt', as "
            f"pipe.save() writes it{hint}"
        )
    try:
        whole = unpacked(folder / "0.pt", shown, own)
        for rank in whole["ranks"][1:]:
            part = unpacked(folder / f"{rank}.pt", shown, own)
            if part["of"] != whole["of"]:
                raise ValueError(f"the file of rank {rank} is of another checkpoint than rank 0's")
            whole = _joined(whole, part)
        return decode(whole)
    except CheckpointError:
        raise
    except Exception as error:  # torch raises all kinds of errors if a file is damaged
        raise CheckpointError(
            f"{shown} is damaged, or not all of a checkpoint ({told(error)}); load an older one"
        ) from error


def _joined(a: Any, b: Any) -> Any:
    """Join what two processes have of a value; if both have it, return the first one's."""
    if isinstance(a, dict) and isinstance(b, dict):
        return {**a, **b, **{key: _joined(a[key], b[key]) for key in a if key in b}}
    return b if isinstance(a, list) and not a else a
