"""A cluster: equal devices in a hierarchy of hosts, racks and so on, with a link for each level."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, prod

import torch

from fxpipe.arguments import check_whole
from fxpipe.errors import InputError
from fxpipe.extensions.simulator.costs import Link
from fxpipe.torchtools.accelerator import kind_of

_BYTES, _TIMES = 1 << 24, 5
_MOST = 1_000_000


@dataclass(frozen=True)
class Level:
    """A level of a cluster, such as a host.

    Attributes:
        name: the level's name, such as ``host``.
        count: how many parts (units of the level below) it has, such as devices in a host.
        link: the link between devices in different parts, in seconds and bytes a second.
    """

    name: str
    count: int
    link: Link = field(default_factory=Link)


@dataclass(frozen=True)
class Cluster:
    """Equal devices in a hierarchy of levels.

    Two hosts of eight devices each::

        host = Level("host", 8, Link(latency=2e-6, bandwidth=300e9))
        rack = Level("rack", 2, Link(latency=5e-6, bandwidth=25e9))
        Cluster((host, rack), memory=16 * 2**30)

    Attributes:
        levels: the levels, the innermost first: hosts, racks, and so on.
        memory: the bytes that a device may hold.
        speed: the speed of a device relative to the one on which the model is measured.
    """

    levels: tuple[Level, ...]
    memory: float = inf
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not self.levels:
            raise InputError('the cluster has no levels; give one, such as Level("host", 8)')
        for level in self.levels:
            check_whole(f"the number of parts of a {level.name}", level.count, 1)
        if prod(level.count for level in self.levels) > _MOST:
            counts = " x ".join(str(level.count) for level in self.levels)
            raise InputError(f"the levels have {counts} devices; a cluster has at most {_MOST}")
        if not self.memory > 0 or not 0 < self.speed < inf:
            raise InputError(
                f"a device has memory {self.memory} and speed {self.speed}; give numbers above 0"
            )

    @property
    def devices(self) -> int:
        """The number of devices."""
        return prod(level.count for level in self.levels)

    @staticmethod
    def measured(devices: Sequence[str | torch.device]) -> Cluster:
        """Measure devices of this machine as one host: their memory, and the link between the first
        and the last by timed copies. CPU devices share their memory, so their link takes no time.

        Raises:
            InputError: ``devices`` is empty, or a string.
        """
        if isinstance(devices, str) or not devices:
            raise InputError(f'devices is {devices!r}; give a list, such as ["cuda:0", "cuda:1"]')
        places = [torch.device(device) for device in devices]
        memory, link = inf, Link()
        if places[0].type != "cpu":
            memory = min(kind_of(place).memory(place)[1] or inf for place in places)
            few, many = (_copying(places[0], places[-1], size) for size in (4, _BYTES))
            link = Link(few, _BYTES / max(many - few, 1e-9))
        return Cluster((Level("host", len(places), link),), memory)

    def layouts(self) -> Iterator[Layout]:
        """Yield every way to place replicas and stages: at each level, the parts are divided into
        equal groups; the parts of a group hold different stages, and the groups are replicas."""
        ways = [
            [(stages, level.count // stages) for stages in _divisors(level.count)]
            for level in self.levels
        ]
        for chosen in itertools.product(*ways):
            yield Layout(self, tuple(s for s, _ in chosen), tuple(r for _, r in chosen))


@dataclass(frozen=True)
class Layout:
    """Where the stages and replicas of a pipeline are.

    Attributes:
        cluster: the devices.
        inside: level → over how many of its parts the stages of a replica are spread.
        beside: level → how many groups of such parts, which are replicas, it has.
    """

    cluster: Cluster
    inside: tuple[int, ...]
    beside: tuple[int, ...]

    @property
    def stages(self) -> int:
        return prod(self.inside)

    @property
    def replicas(self) -> int:
        return prod(self.beside)

    def __str__(self) -> str:
        """How the stages of a replica are spread, such as ``4 a host, 2 a rack``."""
        parts = zip(self.inside, self.cluster.levels, strict=True)
        return ", ".join(f"{count} a {level.name}" for count, level in parts if count > 1) or "one"

    def link(self, stage: int) -> Link:
        """The link from a stage to the next one: that of the outermost level they differ in."""
        place = stage + 1
        for level, count in zip(self.cluster.levels, self.inside, strict=True):
            if place % count:
                return level.link
            place //= count
        return self.cluster.levels[-1].link

    @property
    def between(self) -> Link:
        """The link between replicas: the slowest of all levels that separate some."""
        used = [
            level.link
            for level, count in zip(self.cluster.levels, self.beside, strict=True)
            if count > 1
        ]
        return Link(
            max((link.latency for link in used), default=0.0),
            min((link.bandwidth for link in used), default=inf),
        )

    @property
    def links(self) -> dict[tuple[int, int], Link]:
        """(device, device) → their link, for neighbours in the pipeline, and for (s, s) the link
        from device s to the same stage of other replicas."""
        links = {(s, s): self.between for s in range(self.stages)}
        for s in range(self.stages - 1):
            links |= dict.fromkeys([(s, s + 1), (s + 1, s)], self.link(s))
        return links


def _divisors(count: int) -> list[int]:
    return [divisor for divisor in range(1, count + 1) if count % divisor == 0]


def _copying(source: torch.device, target: torch.device, size: int) -> float:
    """Return the seconds to copy so many bytes between devices, the least of a few tries."""
    data = torch.zeros(size, dtype=torch.uint8, device=source)
    best = inf
    for _ in range(_TIMES):
        start = time.perf_counter()
        data.to(target, copy=True)
        torch.accelerator.synchronize(target)
        best = min(best, time.perf_counter() - start)
    return best
