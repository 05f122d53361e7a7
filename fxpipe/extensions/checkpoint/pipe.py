"""``pipe.checkpoint`` and ``pipe.restore``, ``pipe.save`` and ``pipe.load``."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from fxpipe.compiler.lacking import naming_lacks
from fxpipe.engine import Engine
from fxpipe.extensions.checkpoint import file
from fxpipe.extensions.checkpoint.content import Checkpoint
from fxpipe.extensions.checkpoint.progress import restore_progress, taken
from fxpipe.locks import locked
from fxpipe.pipeline import Pipeline
from fxpipe.torchtools.meta import allocated
from fxpipe.torchtools.part import state_in_part


@locked
def checkpoint(
    pipe: Pipeline, path: str | os.PathLike[str], *, extra: Any = None, shared: bool = False
) -> None:
    """Write to a file all that training needs to go on as if not interrupted. Flushes first.

    The file has the weights, in all versions that later batches read, the buffers, the
    optimizers' state, the states of torch's generators for the CPU and the pipe's devices, and
    the number of batches; without an optimizer also ``.grad``. Everything is stored under its
    name in the model, so training can go on with any partition. The file is as ``torch.save``
    writes it, with checksums, and no code in it is run. It is replaced atomically, so other
    processes may read it at any time.

    Args:
        path: the path of the file.
        extra: anything else to keep, which ``restore`` returns, such as the state of a
            learning-rate scheduler or of ``random``, or an epoch: tensors, numbers, strings,
            and lists, tuples and dicts of them.
        shared: give the file the permissions that the umask allows; otherwise only this user may
            read and write it (mode 0600).

    Raises:
        CheckpointError: the file cannot be written, or cannot hold ``extra``; an older file
            stays as it is.
    """
    pipe._group.refuse("checkpoint()", "write a folder with save()")
    pipe._engine.flush()
    saved = taken(pipe, extra, changed=pipe._engine.progress.changed)
    file.write_checkpoint(saved, path, shared=shared)


@locked
def restore(pipe: Pipeline, path: str | os.PathLike[str]) -> Any:
    """Go on from a checkpoint, at any time, on any number of devices; also after a failure that
    has ended the pipe.

    Everything is checked before anything changes. The constructor of a learning-rate scheduler
    changes its optimizer: make the scheduler over ``optimizer``, then restore, and load its
    state from ``extra``.

    Returns:
        The ``extra`` that ``checkpoint`` was given.

    Raises:
        CheckpointError: the file is no checkpoint, damaged, or of another model or optimizer.
            Nothing has changed.
    """
    with pipe._group.calling("restore"):
        _ready(pipe._engine)
        return _go_on_from(pipe, file.read_checkpoint(path))


def _ready(engine: Engine) -> None:
    """Get ready for a checkpoint to be restored. Raises InputError if the pipe is closed."""
    engine.check(restores=True)
    if engine.progress.ended:
        engine.in_flight = None
    else:
        engine.flush()


@locked
def save(
    pipe: Pipeline,
    folder: str | os.PathLike[str],
    extra: Any = None,
    *,
    shared: bool = False,
    wait: bool = True,
) -> None:
    """Write to a folder all that training needs to go on as if not interrupted. Flushes first.

    The folder has the same contents as a file of ``checkpoint``, in the format of
    ``torch.distributed.checkpoint`` (DCP) with the model's own names, so that it can also be
    read without this library::

        torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, "run.pt")
        model.load_state_dict(torch.load("run.pt")["model"])

    An older folder is replaced once the new one is complete and on disk. Over several ranks
    each rank of the first replica writes the part of its own stages, and every rank of all
    replicas has to call this.

    Args:
        folder: the path of the folder, which may hold an older checkpoint, and nothing else; over
            several ranks the same for all.
        extra: anything else to keep, which ``load`` returns, as for ``checkpoint``. Over
            several ranks rank 0's is kept.
        shared: give the folder and its files the permissions that the umask allows, as ranks of
            several users need it; otherwise only this user may read and write them (modes 0700 and
            0600). That of rank 0 counts.
        wait: whether to return only once the folder is in place. Otherwise ``save`` copies
            everything to host memory, and DCP's own thread writes it while training goes on, as
            ``async_save`` does; the next ``save``, ``load`` and ``close`` wait for it.

    Raises:
        CheckpointError: the folder cannot be written, or cannot hold ``extra``; an older
            checkpoint stays as it is. After ``wait=False``, the next ``step``, ``save``, ``load``
            or ``close`` raises it, once, before it does anything else.
        InputError: ``wait=False`` over ranks, and this PyTorch has no gloo.
        RankError: another rank failed in this way, or is gone.
    """
    with pipe._group.calling("save"):
        from fxpipe.extensions.checkpoint import folder as folders  # slow to import

        if (saving := pipe._engine.beside) is not None:
            saving.wait()
        pipe._engine.flush()
        changed = any(pipe._group.exchange("changes", pipe._engine.progress.changed))
        own = pipe._owned()
        saved = taken(pipe, extra, changed=changed)
        with pipe._engine.progress.true_weights() as others, state_in_part():
            state = pipe._model.state_dict()
        if own is not None:
            saved, state = saved.part(own.kept), own.part(pipe._model, state)
        saved, join = saved.changed(pipe._group.joined), pipe._group.joined
        state = {n: join(n, x) if isinstance(x, Tensor) else x for n, x in state.items()}
        named = pipe._model.named_parameters(remove_duplicate=False)
        apart = {name for name, parameter in named if parameter in others}
        dealt = own is not None and own.shared
        if wait:
            folders.write(saved, state, folder, pipe._group, apart, shared=shared, dealt=dealt)
            return
        from fxpipe.extensions.checkpoint.background import Saving

        with folders.naming(folder):
            tensors = folders.Tensors(saved, state, folder, pipe._group, apart, dealt)
        pipe._engine.beside = saving or Saving()
        pipe._engine.beside.begin(tensors, folder, pipe._group, shared=shared)


@locked
def load(pipe: Pipeline, folder: str | os.PathLike[str], *, must_exist: bool = True) -> Any:
    """Go on from a folder that ``save`` wrote, on any number of devices or ranks.

    As in ``restore``, everything is checked before anything changes. Over several ranks each
    rank reads the part of its own stages, which are known after a step, ``prepare``, or
    ``compile`` with an ``example``.

    Args:
        folder: the path of the folder.
        must_exist: whether a missing folder is an error; otherwise nothing is loaded then.

    Returns:
        The ``extra`` that ``save`` was given; None if nothing is loaded.

    Raises:
        CheckpointError: it is no such folder, or damaged, or of another model or optimizer.
            Nothing has changed, on any rank.
        InputError: the model was built on the meta device and nothing is compiled yet, so that
            a rank does not know its stages.
        RankError: another rank failed in this way, or is gone.
    """
    with pipe._group.calling("load"):
        from fxpipe.extensions.checkpoint import folder as folders  # slow to import

        if pipe._engine.beside is not None:
            pipe._engine.beside.wait()
        _ready(pipe._engine)
        there = pipe._group.exchange("folder", folders.exists(folder))
        if not must_exist and not any(there):
            return None
        if pipe._options.hollow:
            pipe._used()  # raises before anything is read
        own = pipe._owned()
        return _go_on_from(pipe, folders.read(folder, None if own is None else own.used))


def _go_on_from(pipe: Pipeline, saved: Checkpoint) -> Any:
    saved = saved.changed(pipe._group.parted)
    homes, used = pipe._homes(), pipe._used().values() if pipe._options.hollow else ()
    with naming_lacks(pipe._options), allocated(used, homes):
        restore_progress(pipe, saved)
    pipe._group.kept = 0
    return saved.extra
