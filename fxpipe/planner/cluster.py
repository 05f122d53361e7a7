"""A cluster: equal devices in a hierarchy of hosts, racks and so on, with a link for each level."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod

import torch

from fxpipe.errors import InputError, ParseError
from fxpipe.simulator.costs import Link

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    f"{letter}i": float(1 << 10 * power) for power, letter in enumerate("KMGT", start=1)
}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_NUMBER = re.compile(r"(inf|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)([A-Za-z/]*)")
_KEYS = {"device": ("memory", "speed"), "level": ("of", "bandwidth", "latency")}

_BYTES, _TIMES = 1 << 24, 5
_MOST = 1_000_000


@dataclass(frozen=True)
class Level:
    """A level of a cluster, such as a host.

    Attributes:
        name: what it is called.
        count: how many of the level below it has: devices, or hosts.
        link: the way from a device to one in another of these.
    """

    name: str
    count: int
    link: Link


@dataclass(frozen=True)
class Cluster:
    """Devices that are all alike, by levels.

    ``Cluster.parse`` reads one from a few lines::

        device memory=16GiB speed=2
        host   of=8 bandwidth=300GB/s latency=2us
        rack   of=2 bandwidth=25GB/s latency=5us

    Attributes:
        levels: from the innermost on: devices in a host, hosts in a rack, racks.
        memory: bytes that a device may hold.
        speed: of a device, where 1 is the device on which the model is measured.
    """

    levels: tuple[Level, ...]
    memory: float = inf
    speed: float = 1.0

    def __post_init__(self) -> None:
        for level in self.levels:
            if level.count < 1:
                raise InputError(f"{level.name} is of {level.count}; give at least 1")
        if prod(level.count for level in self.levels) > _MOST:
            counts = " x ".join(str(level.count) for level in self.levels)
            raise InputError(f"the levels are of {counts}; a cluster has at most {_MOST} devices")
        if not self.memory > 0 or not 0 < self.speed < inf:
            raise InputError(
                f"a device has memory {self.memory} and speed {self.speed}; give numbers above 0"
            )

    @property
    def devices(self) -> int:
        """How many there are."""
        return prod(level.count for level in self.levels)

    @staticmethod
    def parse(text: str) -> Cluster:
        """Read lines of a word and settings; what is left out is unlimited, and speed 1.

        Raises:
            ParseError: a line has another form.
        """
        device: dict[str, float] | None = None
        levels: list[Level] = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            kind = "device" if words[0] == "device" else "level"
            found: dict[str, float] = {}
            for word in words[1:]:
                key, _, value = word.partition("=")
                if key not in _KEYS[kind]:
                    settings = ", ".join(f"{each}=" for each in _KEYS[kind])
                    raise ParseError(
                        f"{word!r} is no setting of {words[0]}; give {settings}",
                        number,
                        line.index(word) + 1,
                    )
                if key in found:
                    raise ParseError(f"{key}= stands twice", number, line.rindex(word) + 1)
                found[key] = _value(key, value, number, line.index(word) + 1)
            if kind == "device":
                if device is not None:
                    raise ParseError("two lines are of the device; write one", number, 1)
                device = found
                continue
            link = Link(found.get("latency", 0.0), found.get("bandwidth", inf))
            levels.append(Level(words[0], int(found.get("of", 1)), link))
        if not levels:
            raise ParseError(
                "no line says how many devices there are; give one such as host of=8", 1, 1
            )
        return Cluster(tuple(levels), **(device or {}))

    @staticmethod
    def measured(devices: Sequence[str | torch.device]) -> Cluster:
        """The devices of this machine as one host: their memory, and the way from the first to the
        last, as copies of a few and of many bytes take. CPU devices share their memory, so nothing
        is copied between them.

        Raises:
            InputError: there are none.
        """
        if isinstance(devices, str) or not devices:
            raise InputError(f'devices is {devices!r}; give a list, such as ["cuda:0", "cuda:1"]')
        places = [torch.device(device) for device in devices]
        memory, link = inf, Link()
        if places[0].type == "cuda":
            memory = min(torch.cuda.get_device_properties(place).total_memory for place in places)
            few, many = (_copying(places[0], places[-1], size) for size in (4, _BYTES))
            link = Link(few, _BYTES / max(many - few, 1e-9))
        return Cluster((Level("host", len(places), link),), memory)

    def layouts(self) -> Iterator[Layout]:
        """Every way to give replicas and stages to the levels: at each level some of its parts hold
        further stages, and all of these together are replicas of one another."""
        ways = [
            [(stages, level.count // stages) for stages in _divisors(level.count)]
            for level in self.levels
        ]
        for chosen in itertools.product(*ways):
            yield Layout(self, tuple(s for s, _ in chosen), tuple(r for _, r in chosen))

    def __str__(self) -> str:
        lines = [f"device memory={self.memory!r} speed={self.speed!r}"]
        lines += [
            f"{each.name} of={each.count} bandwidth={each.link.bandwidth!r} "
            f"latency={each.link.latency!r}"
            for each in self.levels
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Layout:
    """Where the stages and replicas of a pipeline are.

    Attributes:
        cluster: the devices.
        inside: level → among how many of its parts the stages of a replica are.
        beside: level → how many of its parts are replicas of one another.
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
        """Where the stages of a replica are, such as ``4 a host, 2 a rack``."""
        parts = zip(self.inside, self.cluster.levels, strict=True)
        return ", ".join(f"{count} a {level.name}" for count, level in parts if count > 1) or "one"

    def link(self, stage: int) -> Link:
        """The way from a stage to the next one: of the outermost level at which they differ."""
        at = stage + 1
        for level, count in zip(self.cluster.levels, self.inside, strict=True):
            if at % count:
                return level.link
            at //= count
        return self.cluster.levels[-1].link

    @property
    def between(self) -> Link:
        """The way between replicas: the slowest of all levels that have some."""
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
        """(from, to) → the way, for neighbours and from a device to its replicas."""
        found = {(s, s): self.between for s in range(self.stages)}
        for s in range(self.stages - 1):
            found |= dict.fromkeys([(s, s + 1), (s + 1, s)], self.link(s))
        return found


def _divisors(count: int) -> list[int]:
    return [each for each in range(1, count + 1) if count % each == 0]


def _value(key: str, text: str, line: int, column: int) -> float:
    """A number with its unit: GB/s, GiB, us."""
    match = _NUMBER.fullmatch(text)
    if match is not None:
        unit = match[2] if key == "latency" else match[2].removesuffix("/s").removesuffix("B")
        units, number = _SECONDS if key == "latency" else _UNITS, float(match[1])
        if unit in units and (key != "of" or number.is_integer()):
            return number * units[unit]
    raise ParseError(
        f"{key}={text} is no such number; write of=8, memory=16GiB, bandwidth=25GB/s, "
        "latency=5us or speed=2",
        line,
        column,
    )


def _copying(source: torch.device, target: torch.device, size: int) -> float:
    """Seconds to copy so many bytes between CUDA devices, the least of several times."""
    data = torch.zeros(size, dtype=torch.uint8, device=source)
    best = inf
    for _ in range(_TIMES):
        start = time.perf_counter()
        data.to(target, copy=True)
        torch.cuda.synchronize(target)
        best = min(best, time.perf_counter() - start)
    return best
