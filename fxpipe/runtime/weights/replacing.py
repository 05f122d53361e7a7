"""Files and folders that are replaced only once the new ones are whole."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from fxpipe.signals import HeldSignals

_UNFINISHED = ".fxpipe-"


@contextmanager
def replacing(path: str | os.PathLike[str], *, folder: bool = False) -> Iterator[Path]:
    """Yields a path to write to; if the block succeeds, what is there then replaces ``path``.

    It is in a folder of its own beside ``path``. A writer keeps its folder locked while it lives,
    so that the next writer can recognise and remove the folders of writers that were killed.

    Args:
        path: the file or folder to replace.
        folder: whether it is a folder. Its replacement is two steps: ``standing`` gives the old one
            if the process is killed in between.

    Raises:
        OSError: something else is there, or it cannot be written.
    """
    target = Path(os.path.realpath(path))  # of a symbolic link, what it points to
    there = target.is_dir() if folder else target.is_file()
    if target.is_symlink() or (target.exists() and not there):
        kind = "folder" if folder else "file"
        raise OSError(f"there is something that is no {kind}; move {str(target)!r} away")
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
        if not folder:
            unfinished.chmod(own.stat().st_mode & 0o666)  # the permissions that the umask gives
        _sync(unfinished)
        _exchange(unfinished, target)
        with suppress(OSError):  # not every file system can sync a folder
            _sync(target.parent)
        if folder:
            shutil.rmtree(_old(target), ignore_errors=True)
    finally:
        shutil.rmtree(own, ignore_errors=True)
        os.close(lock)


def standing(path: str | os.PathLike[str]) -> Path:
    """A folder that ``replacing`` has written, also where a writer was killed in the middle of
    exchanging it."""
    target = Path(os.path.realpath(path))
    return _old(target) if not target.exists() and _old(target).exists() else target


def _exchange(unfinished: Path, target: Path) -> None:
    """Put the new one in the old one's place; a folder must be moved away before."""
    if not target.is_dir():
        unfinished.replace(target)
        return
    shutil.rmtree(_old(target), ignore_errors=True)
    with HeldSignals(wake=lambda: None):  # a signal must not come in between
        target.rename(_old(target))
        try:
            unfinished.replace(target)
        except OSError:
            _old(target).rename(target)
            raise


def _old(target: Path) -> Path:
    """Where an old folder is while the new one takes its place."""
    return target.with_name(f".{target.name}.fxpipe-old")


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
