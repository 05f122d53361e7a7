"""The mesh of a pipe, and the rendezvous of its ranks, which find each other once, when the pipe is
compiled."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.errors import InputError, RankError, told
from fxpipe.extensions.ranks.agreement import Ranks
from fxpipe.extensions.ranks.pairs import interruptibly, within
from fxpipe.formatting import numbers_text
from fxpipe.runtime.group import Group
from fxpipe.signals import raise_held

JOINS = timedelta(seconds=30)
"""How long ranks may take to reach each other, once all have met."""


class RankInfo(NamedTuple):
    """What a rank tells the others about itself."""

    number: int
    host: str
    process: int
    token: str
    mesh: tuple[tuple[int, ...], ...]
    device: torch.device


def ranks_of(mesh: DeviceMesh) -> tuple[Group, list[torch.device]]:
    """Connect to the other ranks of a mesh, which all call this. Returns them, and the devices of
    one pipeline; none if there is only this rank.

    Raises:
        InputError: the mesh has other dimensions than those of a pipe, or its devices cannot
            exchange tensors, or ranks have different meshes, or this rank is not in it.
        RankError: a rank does not come, or cannot be reached.
    """
    pipeline, replicas = read_mesh(mesh)
    if mesh.size() == 1:
        return Group(), []
    dims = [dim for dim in (replicas, pipeline) if dim is not None and mesh.shape[dim] > 1]
    devices = 1 if pipeline is None else mesh.shape[pipeline]
    ranks = tuple(map(int, mesh.mesh.movedim(dims, [*range(len(dims))]).flatten()))
    if dist.get_rank() not in ranks:
        raise InputError(
            f"rank {dist.get_rank()} is not in the mesh, which has the ranks "
            f"{', '.join(map(str, ranks))}; call fxpipe.compile on these alone"
        )
    groups, rank = [mesh.get_group(dim) for dim in reversed(dims)], ranks.index(dist.get_rank())
    device = torch.device("cpu")
    if mesh.device_type != "cpu":  # the current device is set for each thread
        device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
    host, token = socket.gethostname(), secrets.token_hex(8)
    shape = tuple(ranks[first : first + devices] for first in range(0, len(ranks), devices))
    info = RankInfo(ranks[rank], host, os.getpid(), token, shape, device)
    infos = interruptibly(lambda: _gathered(groups, info), raise_held)
    for each in infos:
        if each.mesh != infos[0].mesh:
            raise InputError(
                f"rank {each.number} has a mesh of the ranks {each.mesh}, and rank "
                f"{infos[0].number} one of {infos[0].mesh}; make the same mesh on all"
            )
    infos.sort(key=lambda each: ranks.index(each.number))  # from the order of the groups
    store = within(dist.distributed_c10d._get_default_store(), f"fxpipe/{infos[0].token}")
    joined = interruptibly(lambda: _joined(store, rank, len(ranks)), raise_held)
    names = [_name(infos, index, devices) for index in range(len(ranks))]
    timeout = _timeout(groups[0], mesh.device_type)
    group = Ranks(rank, names, store, joined, timeout, len(ranks) // devices)
    group.own_backend = own_backend(mesh)
    group.places = [_place(infos[first::devices]) for first in range(devices)]
    group.threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        group.threads = max(1, group.threads // sum(each.host == host for each in infos))
    return group, [infos[each].device for each in group.pipeline]


def read_mesh(mesh: DeviceMesh) -> tuple[int | None, int | None]:
    """Return the mesh dimensions of the pipeline and of the replicas; None if there is none.

    The single dimension of a mesh is the pipeline, unless it is named "dp".

    Raises:
        InputError: the mesh has other dimensions, or its devices cannot exchange tensors.
    """
    if mesh.device_type not in ("cpu", "cuda") and not own_backend(mesh):
        raise InputError(
            f"the mesh is of {mesh.device_type} devices, and ranks have CPU or CUDA devices, or "
            "those of a backend that you registered with torch.distributed; give "
            'init_device_mesh("cpu", ...) or init_device_mesh("cuda", ...)'
        )
    names = mesh.mesh_dim_names or ()
    pipeline, replicas = (names.index(name) if name in names else None for name in ("pp", "dp"))
    if mesh.ndim == 1 and replicas is None:
        pipeline = 0
    for dim, size in enumerate(mesh.shape):
        if size > 1 and dim not in (pipeline, replicas):
            raise InputError(
                f"the mesh has the dimensions {', '.join(names) or mesh.ndim}, and a pipe uses "
                '"pp", the devices of a pipeline, and "dp", the replicas of it; name them: '
                'init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "pp"))'
            )
    if mesh.device_type == "cuda" and mesh.size() > 1 and not own_backend(mesh):
        check_cuda_ranks()
    return pipeline, replicas


def own_backend(mesh: DeviceMesh) -> str:
    """The name of the backend of the mesh's groups, if somebody has registered it with
    ``torch.distributed.Backend.register_backend``; empty if it is one of torch's own."""
    known: Mapping[str, Any] = dist.Backend._plugins
    backends = dist.get_backend_config(mesh.get_group(0)).split(",")  # cpu:gloo,cuda:nccl
    name = dict(each.split(":") for each in backends).get(mesh.device_type, "").upper()
    return name if name in known else ""


def check_cuda_ranks() -> None:
    """Raise InputError if ranks with CUDA devices cannot exchange tensors."""
    if not torch.distributed.is_nccl_available():
        raise InputError(
            "ranks with CUDA devices need NCCL, and this torch has none; install one that has, or "
            "let one process run the devices: fxpipe.compile(model, number)"
        )
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        raise InputError(
            "with CUDA_LAUNCH_BLOCKING=1 a rank would wait at each receive that it posts ahead; "
            "unset it, or let one process run the devices: fxpipe.compile(model, number)"
        )


def _gathered(groups: Sequence[dist.ProcessGroup], info: RankInfo) -> list[RankInfo]:
    """Return the infos of all ranks. Raises RankError if a rank does not come."""
    infos = [info]
    try:
        with torch.accelerator.device_index(info.device.index):
            for group in groups:  # along the pipeline, then along the replicas
                parts: list[list[RankInfo]] = [[]] * group.size()
                dist.all_gather_object(parts, infos, group=group)
                infos = [each for part in parts for each in part]
    except BaseException as error:
        raise RankError(
            f"the ranks of the mesh did not meet ({told(error)}); every rank has to call "
            "fxpipe.compile with the same mesh",
            rank=-1,
        ) from error
    return infos


def _joined(store: Any, rank: int, size: int) -> Any:
    """Return a gloo process group of all ranks. Raises RankError if one cannot be reached."""
    try:
        return dist.ProcessGroupGloo(within(store, "all"), rank, size, JOINS)
    except BaseException as error:
        raise RankError(
            f"the ranks cannot reach each other ({told(error)}); if no rank's error says anything "
            "else, open the network between the hosts, or name the interface that joins them in "
            "GLOO_SOCKET_IFNAME",
            rank=-1,
        ) from error


def _place(infos: Sequence[RankInfo]) -> str:
    """What tables call the ranks of a device, one of each replica."""
    hosts = {info.host for info in infos}
    where = infos[0].host if len(hosts) == 1 else f"{len(hosts)} hosts"
    ranks = numbers_text(sorted(info.number for info in infos))
    return f"rank{'s' * (len(infos) > 1)} {ranks}, {where}"


def _name(infos: Sequence[RankInfo], index: int, devices: int) -> str:
    """What messages call a rank."""
    info, (replica, device) = infos[index], divmod(index, devices)
    place = f"device {device} of replica {replica}, " if len(infos) > devices else ""
    return f"rank {info.number} ({place}{info.host}, process {info.process})"


def _timeout(group: dist.ProcessGroup, device: str) -> float:
    """The seconds that a rank may be late: ``init_process_group(timeout=...)``."""
    with suppress(Exception):
        return float(group._get_backend(torch.device(device)).options._timeout.total_seconds())
    return 1800.0
