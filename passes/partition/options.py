"""``fxpipe.Partition``, the constraints on how the model is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from numbers import Real
from typing import Any

from fxpipe.errors import InputError
from fxpipe.ir.schedule import Schedule
from fxpipe.passes.partition.work import StageDevices

Each = float | Sequence[float | None]
Pairs = float | Sequence[Sequence[float]]


@dataclass(frozen=True)
class Partition:
    """Constraints on how the model is cut into stages; all are optional.

    ``fxpipe.compile(..., partition=fxpipe.Partition(memory_limits=8 * 2**30))``

    Attributes:
        at: names of submodules; a stage begins at each. None to balance the stages.
        memory_limits: bytes: one number for all devices, or a list with one for each; None for no
            limit. A limit covers all that ``pipe.simulate().memory`` counts: parameters, gradients,
            optimizer state, weight versions, the saved values of as many micro-batches as the
            schedule keeps, and temporary values of the graphs. Without ``optimizer=`` the state
            of an Adam that the caller steps is added. The stages of a device get equal shares of
            its limit.
        device_speeds: a number for each device, relative to each other: 2 is twice as fast as 1.
        link_bandwidth: bytes per second between devices: one number, or a row for each sending
            device with one number for each receiving device. What a stage sends and receives then
            counts towards its time, and predictions use these links.
        link_latency: seconds for each value that is sent between devices, in the same form.
        communicator_bytes: what a rank's device holds for each direction in which it exchanges
            tensors with others, as NCCL does outside of torch; predictions count it.
    """

    at: Sequence[str] | None = None
    memory_limits: Each | None = None
    device_speeds: Sequence[float] | None = None
    link_bandwidth: Pairs | None = None
    link_latency: Pairs | None = None
    communicator_bytes: float = 0

    def check(self, devices: int) -> None:
        """Check the constraints.

        Raises:
            InputError: the cuts are no names, or a number does not fit the devices.
        """
        if not _are_names(self.at or ()):
            raise InputError(f"at is {self.at!r}; give a list of submodule names")
        self.limits(devices)  # checks its numbers, and so does links
        _each("device_speeds", self.device_speeds, devices, alone=False)
        _each("communicator_bytes", self.communicator_bytes or None, 1)
        self.links(devices)

    def limits(self, devices: int) -> tuple[float, ...]:
        """Device → the bytes that it may hold, infinite for None; empty if nothing is limited."""
        return _each("memory_limits", self.memory_limits, devices, gaps=True)

    def links(self, devices: int) -> dict[tuple[int, int], tuple[float, float]]:
        """(From, to) → (seconds per value, bytes per second); empty if nothing is given."""
        rate = _pairs("link_bandwidth", self.link_bandwidth, devices, "bytes a second")
        delay = _pairs("link_latency", self.link_latency, devices, "seconds", zero=True)
        return {
            (a, b): (delay[a][b] if delay else 0.0, rate[a][b] if rate else math.inf)
            for a, b in permutations(range(devices if rate or delay else 0), 2)
        }

    def machine(self, schedule: Schedule, names: Sequence[str]) -> StageDevices:
        """Return the devices as the stages of a schedule see them.

        Args:
            schedule: says where the stages are.
            names: device → its name in messages.
        """
        placement, devices = schedule.placement, schedule.devices
        speeds = _each("device_speeds", self.device_speeds, devices) or (1.0,) * devices
        limits = self.limits(devices)
        links = self.links(devices)

        def between(seconds: Callable[[float, float], float]) -> tuple[tuple[float, ...], ...]:
            """Stage → stage → seconds, by latency and bandwidth; 0 between stages of a device."""
            return tuple(
                tuple(0.0 if a == b else seconds(*links[a, b]) for b in placement)
                for a in (placement if links else ())
            )

        return StageDevices(
            speeds=tuple(speeds[device] for device in placement),
            limits=tuple(limits[device] / placement.count(device) for device in placement)
            if limits
            else (),
            per_byte=between(lambda latency, bandwidth: 1 / bandwidth),
            per_message=between(lambda latency, bandwidth: latency),
            names=tuple(names[device] for device in placement),
        )


def read_partition(partition: Any, memory_limits: Any = None) -> Partition:
    """Make a Partition of the arguments ``partition=`` and ``memory_limits=``.

    Raises:
        InputError: ``partition`` is neither "auto", nor names, nor a Partition; or limits are given
            twice.
    """
    if memory_limits is not None:
        unlimited = read_partition(partition)
        if unlimited.memory_limits is not None:
            raise InputError("memory_limits is given twice; leave it out of the Partition")
        return replace(unlimited, memory_limits=memory_limits)
    if isinstance(partition, Partition):
        return partition
    if isinstance(partition, str):
        if partition != "auto":
            raise InputError(
                f'partition is {partition!r}; give "auto" or a list of submodule names, such as '
                f"[{partition!r}]"
            )
        return Partition()
    if not _are_names(partition):
        raise InputError(
            f'partition is {partition!r}; give "auto", a list of submodule names, at each of '
            "which a stage begins, or a fxpipe.Partition"
        )
    return Partition(at=partition)


def _are_names(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(name, str) for name in value)
    )


def _each(
    what: str, value: Any, devices: int, *, gaps: bool = False, alone: bool = True
) -> tuple[float, ...]:
    """Check and return a number for each device: infinite for None, empty if nothing is given.

    ``gaps`` allows None for a device, ``alone`` one number for all devices.
    """
    if value is None:
        return ()
    if alone and _is_number(value):
        value = [value] * devices
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != devices:
        single = "one number, or " if alone else ""
        wanted = f"{single}a list of {devices}, one for each device"
        raise InputError(f"{what} is {value!r}; give {wanted}")
    for device, number in enumerate(value):
        if not (gaps and number is None) and not (_is_number(number) and number > 0):
            raise InputError(f"{what} of device {device} is {number!r}; give a positive number")
    return tuple(math.inf if number is None else float(number) for number in value)


def _pairs(
    what: str, value: Any, devices: int, unit: str, *, zero: bool = False
) -> list[list[float]]:
    """Check and return a number for each pair of devices; empty if nothing is given."""
    if value is None:
        return []
    rows = [[value] * devices] * devices if _is_number(value) else value
    square = isinstance(rows, Sequence) and len(rows) == devices
    if not square or any(not isinstance(r, Sequence) or len(r) != devices for r in rows):
        raise InputError(
            f"{what} is {value!r}; give one number ({unit}), or {devices} rows of {devices} "
            "numbers, from device to device"
        )
    for source, row in enumerate(rows):
        for target, number in enumerate(row):
            fine = _is_number(number) and (0 <= number < math.inf if zero else number > 0)
            if source != target and not fine:
                raise InputError(
                    f"{what} from device {source} to device {target} is {number!r}; give a "
                    f"positive{' and finite' * zero} number ({unit})"
                )
    return [
        [float(n) if source != target else 1.0 for target, n in enumerate(row)]
        for source, row in enumerate(rows)
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
