"""Ranks that meet again when one of them is gone: the others stay, and a new process joins them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxpipe.errors import InputError, RankError
from fxpipe.extensions.ranks.meeting import Meeting, OverError, interruptibly, within
from fxpipe.extensions.ranks.tree import poison

_PROCESS = f"{os.getpid()} {secrets.token_hex(8)}"

_met: list[Any] = []
"""The store of the meetings, the number of the last one, and the store of its groups, which refer
to it."""


def rejoin(
    store: Any,
    rank: int,
    devices: int,
    replicas: int = 1,
    *,
    timeout: timedelta = timedelta(minutes=10),
) -> DeviceMesh:
    """Meet the other ranks, for the first time or again, and return a mesh of CPU devices.

    Every process calls this at its start, and again after each ``RankError``, which ends its pipe.
    A process that takes the place of a lost one calls it with the lost one's rank. It replaces the
    process groups of torch.distributed, so meshes, groups and pipes from before are of no use.

    Args:
        store: a store of torch.distributed in a process that outlives the ranks.
        rank: this process's number, from 0.
        devices: the devices of a pipeline.
        replicas: how many pipelines train together.
        timeout: how long to wait for a rank: here for all of them to come, and in the pipe as in
            ``init_process_group(timeout=...)``.

    Returns:
        A mesh of the shape (replicas, devices), with the dimensions "dp" and "pp".

    Raises:
        InputError: another process has taken the place of this one.
        RankError: a rank has not come in time.
    """
    meetings, size = within(store, "rejoin"), devices * replicas
    first = not dist.is_initialized()

    def check(own: Any) -> None:
        nonlocal first
        if first:
            own.set(f"process {rank}", _PROCESS)
            first = False
        if own.compare_set(f"process {rank}", _PROCESS, _PROCESS).decode() != _PROCESS:
            raise InputError(f"another process has taken the place of rank {rank}; end this one")

    _destroy()
    limit = timeout.total_seconds()
    absent = "{} has not come; start a process in its place, or give rejoin a longer timeout"
    while True:
        meeting = Meeting(meetings, rank, range(size), None, limit, absent, check)
        try:
            meeting.all(patient=True)
            store = meeting.patient("group")
            group = {"store": store, "rank": rank, "world_size": size, "timeout": timeout}
            mesh = interruptibly([partial(_init, group, replicas, devices)], meeting.look)[0]
            _met[:] = [meetings, meeting.number, store]
            meeting.leave()
            return mesh
        except (RuntimeError, OverError, RankError) as error:  # perhaps a rank was lost just now
            meeting.leave()
            _destroy()
            if meeting.error is not None or (meeting.broken is None and type(error) is RankError):
                raise meeting.error or error from None
        except BaseException:
            meeting.leave(failed=True)
            _destroy()
            raise


def check_met(store: Any) -> None:
    """Raise RankError if the ranks of ``rejoin``'s last mesh meet anew."""
    if _met and dist.is_initialized():
        meetings, number, _ = _met
        if meetings.compare_set("number", number, number).decode() != number:
            raise RankError("a rank was lost; meet the others again: fxpipe.rejoin", rank=-1)


def _init(group: Mapping[str, Any], replicas: int, devices: int) -> DeviceMesh:
    dist.init_process_group("gloo", **group)
    return init_device_mesh("cpu", (replicas, devices), mesh_dim_names=("dp", "pp"))


def _destroy() -> None:
    """Destroy torch.distributed's groups. A mesh that somebody still has would keep connections
    open, and whoever waits for this rank there would wait on."""
    c10d: Any = dist.distributed_c10d
    for group in [*c10d._world.pg_map]:
        if isinstance(group, dist.ProcessGroup) and group.size() > 1:
            with suppress(RuntimeError):
                backend = group._get_backend(torch.device("cpu"))
                if isinstance(backend, dist.ProcessGroupGloo):
                    poison(backend)
    if dist.is_initialized():
        dist.destroy_process_group()
    c10d._world.group_count = 0  # ranks that failed at other places name the next groups alike
