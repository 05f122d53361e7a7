"""Virtual devices of equal speed: groups of one GPU's multiprocessors, each a CUDA green context.

``torch.cuda.green_contexts.GreenContext.create`` splits the GPU anew in every call, so contexts of
several calls share multiprocessors. Here one split makes all contexts, with the driver functions in
the package ``cuda-bindings`` (a dependency of PyTorch's wheels).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.setting import Setting

GRAIN = 8
"""Groups have multiples of so many multiprocessors on GPUs of compute capability 9."""

IGNORE_SM_COSCHEDULING = GREEN_CTX_DEFAULT_STREAM = STREAM_NON_BLOCKING = 1
"""Flags of cuda.h: CU_DEV_SM_RESOURCE_SPLIT_…, CU_…, CU_…. Without co-scheduling multiprocessors of
different clusters may share a group."""


class GroupsError(RuntimeError):
    """The GPU cannot be split; says why."""


@dataclass(frozen=True)
class Groups:
    """Equal and separate groups of multiprocessors.

    Attributes:
        devices: one a group, as ``fxpipe.compile(devices=...)`` takes them: a stream whose kernels
            run on the multiprocessors of its group alone; in a dry run CPU devices.
        multiprocessors: of each group.
        how: the split was made, in words.
    """

    devices: Sequence[Any]
    multiprocessors: int
    how: str


def split(setting: Setting, count: int) -> Groups:
    """Split the GPU. Its contexts and streams live until the process ends.

    Raises:
        GroupsError: the driver, or the bindings of it, cannot do it.
    """
    if setting.dry_run:
        return Groups(setting.devices(count), 0, "CPU devices")
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise GroupsError("cuda.bindings is missing; install cuda-bindings") from error
    torch.zeros((), device=setting.device)  # makes the context that torch computes in
    device = _done(driver.cuDeviceGet(setting.device.index or 0), "cuDeviceGet")
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = _done(driver.cuDeviceGetDevResource(device, kind), "cuDeviceGetDevResource")
    each = whole.sm.smCount // count // GRAIN * GRAIN
    tries = [(each, 0, "co-scheduled"), (each, IGNORE_SM_COSCHEDULING, "not co-scheduled")]
    tries += [(size, 0, "co-scheduled") for size in range(each - GRAIN, 0, -GRAIN)]
    for size, flags, how in tries:
        parts = driver.cuDevSmResourceSplitByCount(count, whole, flags, size)
        if int(parts[0]) or int(parts[2]) < count:
            continue
        groups = parts[1][:count]
        streams = [_stream(driver, device, group, setting.device) for group in groups]
        sizes = {int(group.sm.smCount) for group in groups}
        if len(sizes) == 1:
            return Groups(streams, sizes.pop(), f"green contexts of one split, {how}")
    raise GroupsError(f"{whole.sm.smCount} multiprocessors cannot be split into {count} groups")


def _stream(driver: Any, device: Any, group: Any, place: torch.device) -> torch.cuda.Stream:
    descriptor = _done(driver.cuDevResourceGenerateDesc([group], 1), "cuDevResourceGenerateDesc")
    context = _done(
        driver.cuGreenCtxCreate(descriptor, device, GREEN_CTX_DEFAULT_STREAM), "cuGreenCtxCreate"
    )
    made = _done(
        driver.cuGreenCtxStreamCreate(context, STREAM_NON_BLOCKING, 0), "cuGreenCtxStreamCreate"
    )
    return torch.cuda.ExternalStream(int(made), device=place)


def _done(answer: tuple[Any, ...], name: str) -> Any:
    """What a function of the driver returned behind its status.

    Raises:
        GroupsError: it failed.
    """
    status, *rest = answer
    if int(status):
        raise GroupsError(f"{name}: {status!r}; it needs a driver of CUDA 12.5 or newer")
    return rest[0]
