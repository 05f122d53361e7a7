"""A folder that is written while training goes on, by the asynchronous path of DCP."""

from __future__ import annotations

import warnings
from concurrent import futures
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save

from fxpipe.errors import CheckpointError, InputError
from fxpipe.extensions.checkpoint.folder import Folder, Tensors, Writer, begun, naming
from fxpipe.runtime.group import Group
from fxpipe.signals import raise_held

POLL = 0.1
"""Seconds between two checks for signals while a thread waits for the folder."""


class Saving:
    """The folder that a pipe writes beside its steps; there is at most one at a time."""

    def __init__(self) -> None:
        """Nothing is being written yet."""
        self._processes: Any = None
        self._done: futures.Future[None] | None = None

    def begin(self, tensors: Tensors, path: Folder, group: Group, *, shared: bool) -> None:
        """Copy the tensors to host memory, and let a thread of DCP write them; see ``write``.

        Raises:
            CheckpointError: the folder cannot be written.
            InputError: the processes have no way to write together beside the steps.
        """
        done = futures.Future[None]()
        with naming(path), ExitStack() as stack:
            self._together(group)
            writer = Writer(begun(stack, path, group, shared))
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # so it is meant
            upload: Any = async_save(
                tensors.nested,
                storage_writer=writer,
                planner=_Sealing(tensors),
                process_group=self._processes,
                no_dist=self._processes is None,
            )
            kept = stack.pop_all()

        def finish(written: futures.Future[Any]) -> None:
            """Put the folder in its place, in the thread that wrote it."""
            try:
                with naming(path), kept:
                    try:
                        places = written.result().storage_data.values()
                    except CheckpointException as error:
                        raise error.failures[min(error.failures)][0] from error
                    if group.rank == 0:
                        writer.refuse_missing([place.relative_path for place in places])
            except BaseException as error:
                # rank 0 hears of all failures, and tells them once
                done.set_exception(error) if group.rank == 0 else done.set_result(None)
            else:
                done.set_result(None)

        self._done = done
        upload.add_done_callback(finish)

    def check(self) -> None:
        """Raise CheckpointError, once, if the last folder could not be written."""
        if self._done is not None and self._done.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the folder is in its place. Raises CheckpointError, once, if it cannot be."""
        if self._done is None:
            return
        while not self._done.done():
            futures.wait([self._done], POLL)
            raise_held()
        done, self._done = self._done, None
        if (error := done.exception()) is not None:
            if isinstance(error, CheckpointError):
                raise error
            raise CheckpointError(f"a folder could not be written: {error}") from error

    def close(self) -> None:
        """``wait``, and let go of the other processes."""
        try:
            self.wait()
        finally:
            if self._processes is not None and dist.is_initialized():
                dist.destroy_process_group(self._processes)
                self._processes = None

    def _together(self, group: Group) -> None:
        """Make the process group over which DCP's threads agree, once."""
        if not (dist.is_available() and dist.is_initialized()) or self._processes is not None:
            return
        ranks = group.exchange("processes", dist.get_rank())
        if not dist.is_gloo_available():
            raise InputError(
                "save(wait=False) over ranks needs gloo, which this PyTorch is built without; "
                "save with wait=True"
            )
        self._processes = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


class _Sealing(DefaultSavePlanner):
    """Adds the header, whose checksums need all data, in the thread that writes."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._tensors = tensors

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(self._tensors.sealed(state_dict), storage_meta, is_coordinator)
