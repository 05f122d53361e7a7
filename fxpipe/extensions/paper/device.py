"""A device that is not here: how long operations take on it, by their FLOPs, bytes and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, inf
from numbers import Real

from fxpipe.errors import InputError
from fxpipe.extensions.paper.nodes import operations_of
from fxpipe.extensions.paper.operations import Operation
from fxpipe.extensions.simulator.costs import Link
from fxpipe.ir.plan import Plan
from fxpipe.ir.traced import Traced
from fxpipe.passes.partition.measure import NodeCost

_SPLIT = 512
"""The least length of sums that libraries give to a multiprocessor, where a product has fewer tiles
than there are multiprocessors."""

_HALF = 0.5
"""Of the tiles that multiprocessors compute at once, how many are lost at the end of a product."""


@dataclass(frozen=True)
class Device:
    """A device, by what its data sheet says.

    An operation takes the longest of three times: of its FLOPs, of the bytes that it reads and
    writes, and of its launch. ``compile(..., costs=Device(...))`` takes these times for measured
    ones, and runs nothing of the model.

    The FLOPs of a product are done in tiles by ``units`` multiprocessors, each a tile at a time, so
    that small products use a part of the device only: with w tiles for each multiprocessor, a
    product takes (w + ½) / w of the time that its FLOPs would, and at least that of one tile. Long
    sums are split. Without ``units`` shapes do not matter.

    Attributes:
        flops: floating-point operations a second, of products of 16-bit numbers, at the peak.
        bandwidth: bytes a second of its memory, at the peak.
        efficiency: the share of ``flops`` that large products reach, above 0.
        memory: bytes.
        single: as ``flops``, of 32-bit numbers; by default the same.
        streaming: the share of ``bandwidth`` that operations reach, above 0.
        units: how many multiprocessors there are; 0 if shapes are not to matter.
        tile: rows and columns of a tile.
        launch: seconds that an operation takes at least.
        context: bytes that its driver, libraries and communicators take.
        host: bytes a second between it and the memory of its host.
        link: to the other devices of its host, in seconds and bytes a second that transfers reach.
        network: to devices of other hosts.
        name: in tables.
    """

    flops: float
    bandwidth: float = inf
    efficiency: float = 1.0
    memory: float = inf
    single: float | None = None
    streaming: float = 1.0
    units: int = 0
    tile: int = 128
    launch: float = 0.0
    context: int = 0
    host: float = inf
    link: Link = field(default_factory=Link)
    network: Link = field(default_factory=Link)
    name: str = "device"

    def __post_init__(self) -> None:
        for name in (
            "flops",
            "bandwidth",
            "efficiency",
            "memory",
            "single",
            "streaming",
            "tile",
            "host",
        ):
            value = getattr(self, name)
            if name == "single" and value is None:
                continue
            if not isinstance(value, Real) or isinstance(value, bool) or not float(value) > 0:
                raise InputError(f"{name} of a device is {value!r}; give a number above 0")
            if name in ("flops", "single", "efficiency", "streaming") and float(value) == inf:
                raise InputError(f"{name} of a device is {value!r}; give a finite number above 0")
        for name in ("units", "launch", "context"):
            value = getattr(self, name)
            if (
                not isinstance(value, Real)
                or isinstance(value, bool)
                or not 0 <= float(value) < inf
            ):
                raise InputError(f"{name} of a device is {value!r}; give a number of at least 0")
        for name in ("link", "network"):
            if not isinstance(getattr(self, name), Link):
                raise InputError(
                    f"{name} of a device is {getattr(self, name)!r}; give fxpipe.Link(latency, "
                    "bandwidth)"
                )

    def seconds(self, operation: Operation) -> float:
        """How long an operation takes."""
        moving = operation.bytes / (self.bandwidth * self.streaming)
        return max(self.computing(operation), moving, self.launch)

    def computing(self, operation: Operation) -> float:
        """How long its FLOPs take."""
        if not operation.flops:
            return 0.0
        peak = self.flops if operation.itemsize <= 2 else self.single or self.flops
        plain = operation.flops / (peak * self.efficiency)
        if not self.units or operation.shape is None:
            return plain
        pairs, rows, columns, length = operation.shape
        tiles = pairs * ceil(rows / self.tile) * ceil(columns / self.tile)
        if tiles < self.units:
            tiles *= min(ceil(self.units / tiles), ceil(length / _SPLIT))
        share = tiles / self.units
        return plain * max(share + _HALF, 1.0) / share

    def node_costs(self, traced: Traced, plan: Plan) -> Mapping[str, NodeCost]:
        """Node of a traced graph → its seconds on this device.

        Args:
            traced: the graph.
            plan: the same as one stage, differentiated.
        """
        return operations_of(traced, plan, self.seconds)
