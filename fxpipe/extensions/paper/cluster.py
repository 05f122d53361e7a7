"""A cluster of equal devices, in hosts, racks and so on, with a link for each level."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod

from fxpipe.arguments import check_whole
from fxpipe.errors import InputError, near
from fxpipe.extensions.paper.device import Device
from fxpipe.extensions.paper.presets import PRESETS
from fxpipe.extensions.simulator.costs import Link

_MOST = 1_000_000


@dataclass(frozen=True)
class Cluster:
    """Equal parts side by side: devices, or clusters of devices.

    Eight hosts of eight devices each::

        host = fxpipe.Cluster(H100, 8, link=fxpipe.Link(5e-6, 360e9))
        cluster = fxpipe.Cluster(host, 8, link=fxpipe.Link(1e-5, 45e9))

    Attributes:
        part: a device, or a cluster.
        count: how many parts.
        link: between devices of different parts: what each device has for itself, in seconds and
            bytes a second. By default the ``link`` of the device inside of a host, and its
            ``network`` between hosts.
        shared: whether all devices of a part share that link.
    """

    part: Device | Cluster
    count: int
    link: Link | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.part, Device | Cluster):
            raise InputError(
                f"a cluster is of {self.part!r}; give a fxpipe.Device, or a cluster of some"
            )
        check_whole("the number of parts of a cluster", self.count, 1)
        if self.link is not None and not isinstance(self.link, Link):
            raise InputError(
                f"the link of a cluster is {self.link!r}; give fxpipe.Link(latency, bandwidth)"
            )
        if self.devices > _MOST:
            raise InputError(f"a cluster has {self.devices} devices; at most {_MOST} are planned")

    @staticmethod
    def parse(text: str) -> Cluster:
        """A cluster by its text: ``8xH100`` is a host of eight, ``8xH100/8`` eight such hosts.

        Raises:
            InputError: the text has another form, or the device is unknown.
        """
        match = re.fullmatch(r"(\d+)x([A-Za-z]\w*)(?:/(\d+))?", text)
        if match is None:
            raise InputError(
                f"the cluster is {text!r}; write devices of a host, their name, and how many such "
                "hosts there are, such as 8xH100/4"
            )
        count, name, hosts = match.groups()
        if name not in PRESETS:
            raise InputError(f"there is no device {name!r}: {near(name, PRESETS)}")
        host = Cluster(PRESETS[name], int(count))
        return host if hosts is None else Cluster(host, int(hosts))

    @property
    def device(self) -> Device:
        """The device that all of its devices are like."""
        return self.part if isinstance(self.part, Device) else self.part.device

    @property
    def counts(self) -> tuple[int, ...]:
        """Level, the innermost first → how many parts of the level below it has."""
        inner = () if isinstance(self.part, Device) else self.part.counts
        return (*inner, self.count)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return prod(self.counts)

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Level → the link between devices of its parts, as one device has it."""
        inner = () if isinstance(self.part, Device) else self.part.links
        usual = self.device.network if inner else self.device.link
        link = self.link or usual
        if self.shared and not isinstance(self.part, Device):
            link = Link(link.latency, link.bandwidth / self.part.devices)
        return (*inner, link)

    def level(self, one: int, other: int) -> int:
        """The innermost level at which two devices, by number, are in one part; 0 for a host."""
        size = 1
        for level, count in enumerate(self.counts):
            size *= count
            if one // size == other // size:
                return level
        raise InputError(f"there is no device {max(one, other)} in a cluster of {self.devices}")

    def link_between(self, one: int, other: int) -> Link:
        """The link between two devices, by number."""
        return self.links[self.level(one, other)]

    def __str__(self) -> str:
        inner = self.part.name if isinstance(self.part, Device) else f"({self.part})"
        return f"{self.count} × {inner}"
