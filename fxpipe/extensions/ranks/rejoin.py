"""Ranks that meet again when one of them is gone: the others stay, and a new process joins them."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxpipe.errors import InputError, RankError
from fxpipe.extensions.ranks.pairs import within

POLL = 0.05
"""Seconds between two looks for the other ranks."""

_PROCESS = f"{os.getpid()} {secrets.token_hex(8)}"

_MEETING = "meeting"


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
    if dist.is_initialized():
        dist.destroy_process_group()
    else:
        meetings.set(f"process {rank}", _PROCESS)
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        own = within(meetings, _meet(meetings, rank, size, deadline))
        with suppress(RuntimeError):  # a rank was lost just now
            dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timeout)
            return init_device_mesh("cpu", (replicas, devices), mesh_dim_names=("dp", "pp"))
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(store: Any, rank: int, size: int, deadline: float) -> str:
    """Wait until all ranks have come to a meeting, and return its number.

    Each process comes to the last meeting. If its rank has been there before, that meeting is over:
    one of the ranks is gone. So the next one begins, and whoever waits in the old one goes there.
    """
    while True:
        if store.compare_set(f"process {rank}", _PROCESS, _PROCESS).decode() != _PROCESS:
            raise InputError(f"another process has taken the place of rank {rank}; end this one")
        number: str = store.compare_set(_MEETING, "", "0").decode()
        if store.add(f"{number} {rank}", 1) > 1:
            store.compare_set(_MEETING, number, str(int(number) + 1))
            continue
        while store.get(_MEETING).decode() == number:
            missing = [r for r in range(size) if not store.check([f"{number} {r}"])]
            if not missing:
                return number
            if time.monotonic() > deadline:
                raise RankError(
                    f"rank {missing[0]} has not come; start a process in its place, or give "
                    "rejoin a longer timeout",
                    rank=missing[0],
                )
            time.sleep(POLL)
