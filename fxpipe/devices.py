"""Read the devices that a user names: CPU devices, accelerators, streams, or a mesh of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.errors import InputError
from fxpipe.parts import Parts
from fxpipe.runtime.group import Group
from fxpipe.torchtools.accelerator import Place, available, home

_MOST = 1 << 16

Devices = int | Sequence[str | torch.device | torch.Stream] | DeviceMesh


def read_group(devices: Devices) -> tuple[Group, list[Place]]:
    """Return the processes that run the devices' lists, and the devices of one pipeline.

    Raises:
        InputError: a device does not exist, or the mesh is not one of a pipe.
        RankError: a rank does not come to the rendezvous, or cannot be reached.
    """
    if not isinstance(devices, DeviceMesh):
        return Group(), read_devices(devices)
    group, places = Parts.mesh.find("devices given as a mesh")(devices)
    return group, [*places] or read_devices([devices.device_type])


def read_devices(devices: int | Sequence[str | Place]) -> list[Place]:
    """Return the device or stream of each position in the pipeline.

    Raises:
        InputError: the list is empty, a device does not exist, or devices do not go together.
    """
    if isinstance(devices, bool) or not isinstance(devices, int | Sequence):
        raise InputError(f'devices is {devices!r}; give a list such as ["cpu", "cpu"], or how many')
    if isinstance(devices, int):
        if not 1 <= devices <= _MOST:
            raise InputError(f"devices is {devices}; give at least 1, and at most {_MOST}")
        found = available()
        if found is None or found == "mps":  # MPS is one device with one stream
            return [torch.device("cpu")] * devices
        if devices > (count := torch.accelerator.device_count()):
            raise InputError(
                f"devices is {devices} and there are {count} {found.upper()} devices; "
                "name them one by one, as one device may be listed several times"
            )
        devices = [f"{found}:{index}" for index in range(devices)]
    if isinstance(devices, str):
        raise InputError(f"devices is the string {devices!r}; give a list, such as [{devices!r}]")
    if not devices:
        raise InputError('devices is empty; give at least one, such as ["cpu", "cpu"]')
    places = [_place(device) for device in devices]
    if len({home(place).type for place in places}) > 1:
        raise InputError(f"devices are {', '.join(map(str, places))}; name devices of one kind")
    streams = [place for place in places if isinstance(place, torch.Stream)]
    for index, stream in enumerate(streams):
        if stream in streams[:index]:
            raise InputError(
                f"{stream} stands twice in devices, and its stages would run one after the other; "
                f'give each entry a stream of its own, or name "{stream.device}" twice'
            )
    return places


def _place(name: str | Place) -> Place:
    """The device of a name, with its index if it is none of the CPU, or a stream as it is."""
    if isinstance(name, torch.Stream):
        return name
    try:
        device = torch.device(name)
        if not isinstance(name, str | torch.device):
            raise TypeError
    except (RuntimeError, TypeError):
        raise InputError(f'there is no device {name!r}; name one such as "cpu"') from None
    if device.type == "cpu":
        return device
    found = available()
    if found is None or found != device.type:
        known = "CPU" if found is None else f"CPU or {found.upper()}"
        raise InputError(
            f'stages cannot run on {device} here; name {known} devices, such as ["cpu", "cpu"]'
        )
    count = torch.accelerator.device_count()
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= count:
        raise InputError(
            f"there is no {device}; the {found.upper()} devices are {found}:0 to "
            f"{found}:{count - 1}"
        )
    return torch.device(found, index)
