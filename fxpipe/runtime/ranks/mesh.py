"""What a mesh says of a pipe: along which dimensions its devices and its replicas are."""

from __future__ import annotations

import os

import torch
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.errors import InputError


def read_mesh(mesh: DeviceMesh) -> tuple[int | None, int | None]:
    """The dimension of the devices of a pipeline, and that of its replicas, where there are some.

    A mesh of one dimension has the devices of one pipeline, unless it is named "dp".

    Raises:
        InputError: the mesh has other dimensions, or its devices cannot exchange tensors.
    """
    if mesh.device_type not in ("cpu", "cuda"):
        raise InputError(
            f"the mesh is of {mesh.device_type} devices, and stages run on CPU or CUDA devices; "
            'give init_device_mesh("cpu", ...) or init_device_mesh("cuda", ...)'
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
    if mesh.device_type == "cuda" and mesh.size() > 1:
        check_cuda_ranks()
        if replicas is not None and mesh.shape[replicas] > 1:
            raise InputError(
                f"'dp' of the mesh of CUDA devices has {mesh.shape[replicas]} ranks, and replicas "
                'run on CPUs so far; give a mesh in which "pp" has all ranks'
            )
    return pipeline, replicas


def check_cuda_ranks() -> None:
    """Raises InputError where ranks with CUDA devices cannot exchange tensors."""
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
