"""Replaces files and folders, each only once the new one is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from fxpipe.signals import HeldSignals


@contextmanager
def replacing(
    path: str | os.PathLike[str], *, folder: bool = False, shared: bool = False
) -> Iterator[Path]:
    """Yield a path to write to; if the block succeeds, the file or folder there replaces ``path``.

    The yielded path is in a temporary folder beside ``path``, which a writer that is killed leaves.

    Args:
        path: the file or folder to replace.
        folder: whether it is a folder. Replacing one takes two steps; if the process is killed
            between them, ``standing`` returns the old folder.
        shared: whether it has the permissions that the umask gives; otherwise only this user may
            read it, while it is written, too.

    Raises:
        OSError: something else is there, or it cannot be written.
    """
    target = Path(os.path.realpath(path))  # a symbolic link stays, its target is replaced
    there = target.is_dir() if folder else target.is_file()
    if target.is_symlink() or (target.exists() and not there):
        kind = "folder" if folder else "file"
        raise OSError(f"there is something that is not a {kind}; move {str(target)!r} away")
    temporary = target.with_name(f".fxpipe-{uuid4().hex}")
    temporary.mkdir(0o777 if shared else 0o700)
    try:
        unfinished = temporary / "checkpoint"
        yield unfinished
        mode = temporary.stat().st_mode
        if not folder:
            unfinished.chmod(mode & 0o666)
        elif not shared:  # else all is as the umask has made it
            for file in unfinished.iterdir():
                file.chmod(mode & 0o666)
            unfinished.chmod(mode & 0o777)
        _sync(unfinished)
        _exchange(unfinished, target)
        with suppress(OSError):  # not every file system can sync a folder
            _sync(target.parent)
        if folder:
            shutil.rmtree(_old(target), ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def standing(path: str | os.PathLike[str]) -> Path:
    """The folder that ``replacing`` last completed: if a writer was killed between the two steps of
    a replacement, the old one."""
    target = Path(os.path.realpath(path))
    return _old(target) if not target.exists() and _old(target).exists() else target


def _exchange(unfinished: Path, target: Path) -> None:
    """Put the new file or folder in the old one's place; an old folder must be moved away first."""
    if not target.is_dir():
        unfinished.replace(target)
        return
    shutil.rmtree(_old(target), ignore_errors=True)
    with HeldSignals():  # a signal must not interrupt between the two steps
        target.rename(_old(target))
        try:
            unfinished.replace(target)
        except OSError:
            _old(target).rename(target)
            raise


def _old(target: Path) -> Path:
    """Where an old folder is kept while the new one takes its place."""
    return target.with_name(f".{target.name}.fxpipe-old")


def _sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk, so that they survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
