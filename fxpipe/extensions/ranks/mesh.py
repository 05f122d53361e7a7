"""The mesh of a pipe, and the rendezvous of its ranks, which find each other once, when the pipe is
compiled."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.errors import InputError, RankError, told
from fxpipe.extensions.ranks.agreement import Ranks
from fxpipe.extensions.ranks.meeting import Meeting, OverError, interruptibly, within
from fxpipe.extensions.ranks.pairs import in_the_background
from fxpipe.extensions.ranks.rejoin import check_met
from fxpipe.extensions.ranks.tree import neighbours
from fxpipe.formatting import numbers_text
from fxpipe.runtime.group import Group

JOINS = timedelta(seconds=30)
"""How long ranks may take to reach each other, once all have met. (gloo itself waits as long where
the other one has ended just then.)"""


QUEUES = 8
"""Hardware queues that CUDA has by default: a rank with three peers has about eleven streams."""


class RankInfo(NamedTuple):
    """What a rank tells the others about itself."""

    number: int
    host: str
    process: int
    mesh: tuple[tuple[int, ...], ...]
    device: str


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
    own = [dim for dim in (replicas, pipeline) if dim is not None and mesh.shape[dim] > 1]
    others = [d for d in range(mesh.ndim) if mesh.shape[d] > 1 and d not in (replicas, pipeline)]
    dims = [*others, *own]
    devices = 1 if pipeline is None else mesh.shape[pipeline]
    ranks = tuple(map(int, mesh.mesh.movedim(dims, [*range(len(dims))]).flatten()))
    if dist.get_rank() not in ranks:
        raise InputError(
            f"rank {dist.get_rank()} is not in the mesh, which has the ranks "
            f"{', '.join(map(str, ranks))}; call fxpipe.compile on these alone"
        )
    rank = ranks.index(dist.get_rank())
    device = torch.device("cpu")
    if mesh.device_type != "cpu":  # the current device is set for each thread
        device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
    host, count = socket.gethostname(), len(ranks)
    shape = tuple(ranks[first : first + devices] for first in range(0, count, devices))
    timeout = _timeout(mesh.get_group(dims[-1]), mesh.device_type)
    met = Meeting(
        within(dist.distributed_c10d._get_default_store(), f"fxpipe/{sorted(ranks)}"),
        ranks[rank],
        ranks,
        tuple(RankInfo(ranks[rank], host, os.getpid(), shape, str(device))),
        timeout,
        f"{{}} has not come to fxpipe.compile in {timeout:.0f} s, the timeout of "
        "init_process_group; every rank has to call it with the same mesh",
        check_met,
    )
    failed = True
    try:
        infos = sorted(RankInfo(*each) for each in met.all())
        for each in infos:
            if each.mesh != infos[0].mesh:
                raise InputError(
                    f"rank {each.number} has a mesh of the ranks {each.mesh}, and rank "
                    f"{infos[0].number} one of {infos[0].mesh}; make the same mesh on all"
                )
        infos.sort(key=lambda each: ranks.index(each.number))  # from that of the last to come
        copies = 1 if replicas is None else mesh.shape[replicas]
        names = [_name(infos, index, devices, copies) for index in range(count)]
        columns = {
            (mesh.mesh_dim_names or ())[dim]: [
                ranks.index(int(each)) for each in dist.get_process_group_ranks(mesh.get_group(dim))
            ]
            for dim in others
        }
        group = joined(met, rank, names, timeout, copies, columns)
        failed = False
    finally:
        met.leave(failed=failed)
    group.own_backend = own_backend(mesh)
    group.groups = {(mesh.mesh_dim_names or ())[dim]: mesh.get_group(dim) for dim in others}
    group.places = [_place(infos[first::devices]) for first in range(devices)]
    group.threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        group.threads = max(1, group.threads // sum(each.host == host for each in infos))
    return group, [torch.device(infos[each].device) for each in group.pipeline]


def read_mesh(mesh: DeviceMesh) -> tuple[int | None, int | None]:
    """Return the mesh dimensions of the pipeline and of the replicas; None if there is none.

    The single dimension of a mesh is the pipeline, unless it is named "dp". Others, with names,
    divide the parameters of stages.

    Raises:
        InputError: a dimension has no name, or the devices cannot exchange tensors.
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
    if mesh.ndim > 1 and not names:
        raise InputError(
            f"the mesh has {mesh.ndim} dimensions without names, and a pipe uses "
            '"pp", the devices of a pipeline, "dp", the replicas of it, and others, such as "tp", '
            "over which the model has DTensors; name them: "
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
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if queues.isdigit() and int(queues) < QUEUES:
        raise InputError(
            f"with CUDA_DEVICE_MAX_CONNECTIONS={queues} a receive that a rank posts ahead holds up "
            "what it launches after it, also the send for which the other rank waits; unset it, or "
            "set it to 32"
        )
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        raise InputError(
            "with CUDA_LAUNCH_BLOCKING=1 a rank would wait at each receive that it posts ahead; "
            "unset it, or let one process run the devices: fxpipe.compile(model, number)"
        )


def joined(
    met: Meeting,
    rank: int,
    names: Sequence[str],
    timeout: float,
    replicas: int,
    columns: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Ranks:
    """Connect the ranks that have met. Raises RankError if one is lost, or cannot be reached."""
    gloo: Any = dist.ProcessGroupGloo
    options, named = gloo._Options(), os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    options._timeout, options._threads = JOINS, 1
    with in_the_background():  # all groups share one port and one thread
        made = gloo.create_device(interface=named) if named else gloo.create_default_device()
    options._devices = [made]
    others = neighbours(rank, len(names))
    stores = [met.patient(f"tree {max(rank, other)}") for other in others]

    def connect(store: Any, other: int) -> Any:
        return gloo(store, int(other < rank), 2, options)

    try:
        works = [partial(connect, *each) for each in zip(stores, others, strict=True)]
        edges = dict(zip(others, interruptibly(works, met.look), strict=True))
    except (RuntimeError, OverError) as error:
        met.explain()
        raise RankError(
            f"the ranks cannot reach each other ({told(error)}); if no rank's error says anything "
            "else, open the network between the hosts, or name the interface that joins them in "
            "GLOO_SOCKET_IFNAME",
            rank=-1,
        ) from error
    store = within(met.store, f"{met.number}/pipe")
    group = Ranks(rank, names, store, edges, timeout, replicas, columns)
    try:
        group.meets(met.look)
    except BaseException as error:
        group.close()
        if isinstance(error, RankError):
            met.explain(1.0)  # another one may have left for a rank that was lost
        raise
    return group


def _place(infos: Sequence[RankInfo]) -> str:
    """What tables call the ranks of a device, one of each replica."""
    hosts = {info.host for info in infos}
    where = infos[0].host if len(hosts) == 1 else f"{len(hosts)} hosts"
    ranks = numbers_text(sorted(info.number for info in infos))
    return f"rank{'s' * (len(infos) > 1)} {ranks}, {where}"


def _name(infos: Sequence[RankInfo], index: int, devices: int, replicas: int) -> str:
    """What messages call a rank."""
    info, (before, device) = infos[index], divmod(index, devices)
    column, replica = divmod(before, replicas)
    parts = [f"device {device}" + f" of replica {replica}" * (replicas > 1)]
    parts += [f"part {column}"] if len(infos) > devices * replicas else []
    place = f"{', '.join(parts)}, " if len(infos) > devices else ""
    return f"rank {info.number} ({place}{info.host}, process {info.process})"


def _timeout(group: dist.ProcessGroup, device: str) -> float:
    """The seconds that a rank may be late: ``init_process_group(timeout=...)``."""
    with suppress(Exception):
        return float(group._get_backend(torch.device(device)).options._timeout.total_seconds())
    return 1800.0
