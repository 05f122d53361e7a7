"""Processes with a simulated device each, which transfer tensors as by NCCL."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.ranks import served, store_of
from tests.simcuda.process import at_once

dist: Any = torch.distributed


def on_devices_of_ranks(
    size: int, function: Callable[..., Any], *args: Any, replicas: int | None = None
) -> list[Any]:
    """Call ``function(mesh, *args)`` on ranks that have a simulated device each. The mesh has the
    dimension "pp", or with a number of replicas "dp" and "pp".

    Raises:
        AssertionError: the function raised on a rank, or its process has ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        calls = [(rank, size, folder, served(), function, args, replicas) for rank in range(size)]
        return at_once(_call, calls, devices=size)


def _call(
    rank: int,
    size: int,
    folder: str,
    port: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    replicas: int | None,
) -> Any:
    from tests.simcuda import cuda, nccl

    nccl.install()
    torch.cuda.set_device(rank)
    cuda.configure(cuda.Mode.LAZY)
    store = store_of(port, folder)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    names = ("pp",) if replicas is None else ("dp", "pp")
    shape = (size,) if replicas is None else (replicas, size // replicas)
    found = function(init_device_mesh("cuda", shape, mesh_dim_names=names), *args)
    torch.cuda.synchronize(rank)  # the others wait for what this process still sends
    dist.barrier()
    return found
