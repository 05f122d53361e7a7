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
from fxpipe.extensions.simulator.costs import Link
from fxpipe.torchtools.accelerator import kind_of

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
        name: the level's name, such as ``host``.
        count: how many parts (units of the level below) it has, such as devices in a host.
        link: the link between devices in different parts.
    """

    name: str
    count: int
    link: Link


@dataclass(frozen=True)
class Cluster:
    """Equal devices in a hierarchy of levels.

    ``Cluster.parse`` reads one from a few lines::

        device memory=16GiB speed=2
        host   of=8 bandwidth=300GB/s latency=2us
        rack   of=2 bandwidth=25GB/s latency=5us

    Attributes:
        levels: the levels, the innermost first: hosts, racks, and so on.
        memory: the bytes that a device may hold.
        speed: the speed of a device relative to the one on which the model is measured.
    """

    levels: tuple[Level, ...]
    memory: float = inf
    speed: float = 1.0

    def __post_init__(self) -> None:
        for level in self.levels:
            if level.count < 1:
                raise InputError(f"{level.name} has {level.count} parts; give at least 1")
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
    def parse(text: str) -> Cluster:
        """Read a cluster from lines of a word and settings. Memory and bandwidth default to
        unlimited, latency to 0, and ``speed`` and ``of`` to 1.

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
            settings: dict[str, float] = {}
            for word in words[1:]:
                key, _, value = word.partition("=")
                if key not in _KEYS[kind]:
                    keys = ", ".join(f"{known}=" for known in _KEYS[kind])
                    raise ParseError(
                        f"{word!r} is no setting of {words[0]}; give {keys}",
                        number,
                        line.index(word) + 1,
                    )
                if key in settings:
                    raise ParseError(f"{key}= is given twice", number, line.rindex(word) + 1)
                settings[key] = _value(key, value, number, line.index(word) + 1)
            if kind == "device":
                if device is not None:
                    raise ParseError("two lines describe the device; write one", number, 1)
                device = settings
                continue
            link = Link(settings.get("latency", 0.0), settings.get("bandwidth", inf))
            levels.append(Level(words[0], int(settings.get("of", 1)), link))
        if not levels:
            raise ParseError(
                "no line says how many devices there are; give one such as host of=8", 1, 1
            )
        return Cluster(tuple(levels), **(device or {}))

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

    def __str__(self) -> str:
        lines = [f"device memory={self.memory!r} speed={self.speed!r}"]
        lines += [
            f"{level.name} of={level.count} bandwidth={level.link.bandwidth!r} "
            f"latency={level.link.latency!r}"
            for level in self.levels
        ]
        return "\n".join(lines)


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


def _value(key: str, text: str, line: int, column: int) -> float:
    """Read a number with its unit, such as GB/s, GiB or us. Raises ParseError if it is none."""
    match = _NUMBER.fullmatch(text)
    if match is not None:
        unit = match[2] if key == "latency" else match[2].removesuffix("/s").removesuffix("B")
        units, number = _SECONDS if key == "latency" else _UNITS, float(match[1])
        if unit in units and (key != "of" or number.is_integer()):
            return number * units[unit]
    raise ParseError(
        f"{key}={text} is not a valid number; write of=8, memory=16GiB, bandwidth=25GB/s, "
        "latency=5us or speed=2",
        line,
        column,
    )


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
