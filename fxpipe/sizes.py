"""``pipe.sizes``: what stages compute and hold as expressions in the micro-batch, and the largest
micro-batch that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
from rich.console import Console
from rich.table import Table

from fxpipe.passes.extents import BATCH, Extent

_MOST = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """Bytes and FLOPs of the stages, in ``b``, the samples of a micro-batch.

    Attributes:
        stages: stage → FLOPs, and bytes saved and sent.
        memory: stage → bytes that it occupies: parameters with gradients, optimizer state and
            versions, and what as many micro-batches save as the schedule holds at once.
        devices: stage → what its device is called.
        limits: stage → bytes that it may occupy; infinite where there is no limit.
    """

    stages: tuple[Extent, ...]
    memory: tuple[sympy.Expr, ...]
    devices: tuple[str, ...]
    limits: tuple[float, ...]

    @property
    def largest(self) -> int | None:
        """The most samples of a micro-batch with which every stage keeps its limit: solved from
        ``memory``; 0 where none does, None where there is no limit or none is reached."""
        found = [_largest(*pair) for pair in zip(self.memory, self.limits, strict=True)]
        least = min(found, default=_MOST)
        return None if least >= _MOST else least

    def __str__(self) -> str:
        """A table, and the largest micro-batch where memory is limited."""
        table = Table()
        for heading in (
            "stage",
            "forward FLOPs",
            "backward FLOPs",
            "saved B",
            "sent B",
            "memory B",
        ):
            table.add_column(heading, justify="right", overflow="fold")
        for stage, (extent, memory) in enumerate(zip(self.stages, self.memory, strict=True)):
            terms = (extent.forward, extent.backward, extent.saved, extent.sent, memory)
            table.add_row(str(stage), *map(str, terms))
        console = Console(width=130, color_system=None)
        with console.capture() as capture:
            console.print(table)
        lines = [line.rstrip() for line in capture.get().rstrip().splitlines()]
        return "\n".join([*lines, "b: samples in a micro-batch", *self.verdict()])

    def verdict(self) -> Sequence[str]:
        """A line on the largest micro-batch; none where memory is not limited."""
        if all(limit == math.inf for limit in self.limits):
            return []
        largest = self.largest
        if largest is None:
            return ["any micro-batch fits the memory limits"]
        sizes = [_largest(*pair) for pair in zip(self.memory, self.limits, strict=True)]
        stage = sizes.index(largest)
        return [
            f"the largest micro-batch that fits the memory limits has {largest} samples "
            f"(stage {stage} on {self.devices[stage]}: {self.memory[stage]} B)"
        ]


def _largest(memory: sympy.Expr, limit: float) -> int:
    """The largest whole b, at most _MOST, with ``memory <= limit``; more samples need more."""
    if limit == math.inf or not memory.has(BATCH):
        return _MOST if memory.subs(BATCH, 1) <= limit else 0
    if memory.is_polynomial(BATCH) and sympy.degree(memory, BATCH) == 1:
        slope = memory.coeff(BATCH, 1)
        return max(0, min(_MOST, int(sympy.floor((int(limit) - memory.coeff(BATCH, 0)) / slope))))
    low, high = 0, _MOST
    while low < high:
        middle = (low + high + 1) // 2
        if memory.subs(BATCH, middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low
